"""Measures eight single changes of PPO against the default at tiny scale, over three seeds.

    python -m bench.choices [change ...]        all of them without a name; see CHANGES

Each seed has a workspace of its own below .cache/choices, under a key of the code, which is copied, so that an edit
meanwhile changes no run: data and SFT model are made there once, and every run is
`python -m stages.train_ppo key=value ...`. A run whose result is there is not made again, so the command goes on where
it was stopped. It writes bench/results/choices.csv after every run, and the table in docs/ppo.md when no row is
missing.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rlhf import anchors, config, locks
from rlhf.errors import UsageError, UserError, run_command
from rlhf.stage import override_place
from tasks.processes import supervised

CHANGES: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "lambda": ("ppo.lam=1",),
    "gamma": ("ppo.gamma=0.99",),
    "unwhitened": ("ppo.whiten_advantages=false",),
    "value-clip": ("ppo.value_clip=1000",),
    "k3-loss": ("ppo.kl.place=loss", "ppo.kl.estimator=k3"),
    "cut-off": ("ppo.reward.cut_off_score=-1",),
    "dual-clip": ("ppo.dual_clip=3",),
    "separate-critic": ("ppo.critic.kind=separate", "ppo.critic.lr=0.0003"),
}
SEEDS = (0, 1, 2)
SETTING = ("ppo.iterations=6", "ppo.eval_every=6")
PREPARATION = ("prepare_data", "fetch_sft", "finetune_sft")
CODE = ("rlhf", "stages", "conf", "requirements.lock")

RESULTS = anchors.CHECKOUT / "bench" / "results" / "choices.csv"
PAGE = anchors.CHECKOUT / "docs" / "ppo.md"
BEGIN, END = "<!-- choices: written by python -m bench.choices -->", "<!-- choices: end -->"


class Result(NamedTuple):
    """One run: greedy validation accuracy before and after PPO, and the last rollout's KL in nats a sequence."""

    change: str
    seed: int
    before: float
    after: float
    kl_sequence: float


def main(arguments: Sequence[str]) -> int:
    """Makes the runs that are missing among those asked for; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    if unknown := next((name for name in arguments if name not in CHANGES), None):
        raise UsageError(f"{unknown}: no such change: take {', '.join(CHANGES)}")
    signal.signal(signal.SIGTERM, _interrupt)
    root = anchors.CHECKOUT / ".cache" / "choices" / code_key(anchors.CHECKOUT)
    with locks.exclusive(root / "lock", "measures here: wait for it or stop it"):
        measure(root, arguments or list(CHANGES))
    return 0


def measure(root: Path, changes: Sequence[str]) -> None:
    """Runs what is missing, seed by seed, and writes what there is after each run."""
    for seed in SEEDS:
        workspace = prepare(root, seed)
        for change in changes:
            start = time.monotonic()
            if not result_file(workspace, change).is_file():
                run(workspace, "train_ppo", overrides(change))
            result = read_result(workspace, change, seed)
            print(
                f"choices: seed {seed} {change}: {100 * result.before:.1f} % → {100 * result.after:.1f} % "
                f"({time.monotonic() - start:.0f} s)",
                flush=True,
            )
            write_results(root)


def overrides(change: str) -> list[str]:
    """What the stage is told."""
    return [*SETTING, *CHANGES[change]]


def code_key(checkout: Path) -> str:
    """A key of all that decides a result beside params: results of other code are never taken for this code's."""
    digest = sha256()
    for name in CODE:
        place = checkout / name
        for file in sorted([place] if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.yaml")]):
            digest.update(f"{file.relative_to(checkout)}\0".encode() + sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def copy_code(root: Path) -> Path:
    """The code as it is now, or as it was when `root` was made: the directory appears whole."""
    code, written = root / "code", root / ".code.new"
    if not code.is_dir():
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
        for name in CODE:
            source = anchors.CHECKOUT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, written / name)
        written.replace(code)
    return code


def prepare(root: Path, seed: int) -> Path:
    """The seed's workspace with its params, data and SFT model; the code is linked."""
    code, workspace = copy_code(root), root / f"seed-{seed}"
    workspace.mkdir(parents=True, exist_ok=True)
    for name in CODE:
        if not (workspace / name).is_symlink():
            (workspace / name).symlink_to(code / name)
    config.write(config.compose(["scale=tiny", f"seed={seed}"]), workspace / config.PARAMS_FILE)
    if not (workspace / "models" / "sft").is_dir():
        for stage in PREPARATION:
            run(workspace, stage, [])
    return workspace


def run(workspace: Path, stage: str, arguments: Sequence[str]) -> None:
    """Runs a stage in the workspace, its output in a file; raises UserError that names the file where it fails."""
    log = workspace / f"{stage}.log"
    places = {"MLFLOW_TRACKING_URI": f"sqlite:///{workspace / 'mlflow.db'}", "RLHF_STATE_DIR": str(workspace / "state")}
    command = ["python", "-m", f"stages.{stage}", *arguments]
    with log.open("w") as output, supervised(command, directory=workspace, environ=places, output=output) as process:
        code = process.wait()
    if code:
        raise UserError(f"{' '.join(command[1:])} failed with {code}: see {log}")


def result_file(workspace: Path, change: str) -> Path:
    """Where the stage writes the change's metrics."""
    params = config.load(overrides(change), workspace / config.PARAMS_FILE)
    return override_place(workspace, "train_ppo", params) / "metrics" / "ppo.json"


def read_result(workspace: Path, change: str, seed: int) -> Result:
    """The result of a run that has been made."""
    metrics = json.loads(result_file(workspace, change).read_text())
    before, final = metrics["initial"]["validation_accuracy"], metrics["final"]
    return Result(change, seed, before, final["validation_accuracy"], final["kl_sequence"])


def write_results(root: Path) -> None:
    """Writes the results that there are, and the table in the page once none is missing."""
    workspaces = {seed: root / f"seed-{seed}" for seed in SEEDS}
    results = [
        read_result(workspace, change, seed)
        for change in CHANGES
        for seed, workspace in workspaces.items()
        if (workspace / config.PARAMS_FILE).is_file() and result_file(workspace, change).is_file()
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([Result._fields, *results])
    RESULTS.parent.mkdir(exist_ok=True)
    _replace(RESULTS, text.getvalue())
    if len(results) == len(CHANGES) * len(SEEDS):
        by_change = {change: [result for result in results if result.change == change] for change in CHANGES}
        _replace(PAGE, with_table(PAGE.read_text(), table(by_change)))


def _replace(path: Path, text: str) -> None:
    """Writes the file whole or not at all."""
    written = path.with_name(f".{path.name}.new")
    written.write_text(text)
    written.replace(path)


def table(results: Mapping[str, Sequence[Result]]) -> str:
    """Markdown: accuracy after PPO for each seed, its mean and range, and the paired difference from the baseline.

    The first row is the SFT model that every change starts from; KL is the last rollout's, a mean over sequences.
    """
    baseline = results["baseline"]
    seeds = " | ".join(f"seed {result.seed}" for result in baseline)
    rows = [
        f"| validation accuracy, % | {seeds} | mean (range) | points above the default, mean (range) | KL, nats |",
        "| --- |" + " --- |" * (len(baseline) + 3),
        f"| before PPO | {_cells([100 * r.before for r in baseline])} | | |",
    ]
    for change, runs in results.items():
        differences = [100 * (run.after - base.after) for run, base in zip(runs, baseline, strict=True)]
        against = "" if change == "baseline" else _spread(differences, "+.1f")
        kl = sum(run.kl_sequence for run in runs) / len(runs)
        name = ", ".join(f"`{override}`" for override in CHANGES[change]) or "default"
        rows.append(f"| {name} | {_cells([100 * r.after for r in runs])} | {against} | {kl:.2f} |")
    return "\n".join(rows)


def _cells(values: Sequence[float]) -> str:
    return " | ".join([*(f"{value:.1f}" for value in values), _spread(values, ".1f")])


def _spread(values: Sequence[float], form: str) -> str:
    return f"{sum(values) / len(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def with_table(page: str, text: str) -> str:
    """The page with `text` between its marks; raises UserError where it has none."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{PAGE.name}: the marks of the table are missing: put {BEGIN} and {END} back")
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    stopped = "interrupted: every run that was done stays done, run it again to go on"
    sys.exit(run_command("choices", lambda: main(sys.argv[1:]), stopped))
