"""Measures eight single changes of PPO against the default at tiny scale, over three seeds.

    python -m bench.choices [change ...]        all of them without a name; see CHANGES

Each seed has a workspace (bench/workspaces.py), where data and SFT model are made once and every run is
`python -m stages.train_ppo key=value ...`; one that is done is not made again. It writes bench/results/choices.csv
after every run, and the table in docs/ppo.md once all rows are there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.workspaces import RESULTS, measuring, output, prepare, run, with_marked, write_csv, write_text
from rlhf import anchors, config
from rlhf.errors import UsageError, run_command

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

TABLE = RESULTS / "choices.csv"
PAGE = anchors.CHECKOUT / "docs" / "ppo.md"


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
    with measuring("choices") as root:
        measure(root, arguments or list(CHANGES))
    return 0


def measure(root: Path, changes: Sequence[str]) -> None:
    """Runs what is missing, seed by seed, and writes what there is after each run."""
    for seed in SEEDS:
        workspace = prepare(root, f"seed-{seed}", ["scale=tiny", f"seed={seed}"], PREPARATION)
        for change in changes:
            start = time.monotonic()
            if not result_file(workspace, change).is_file():
                run(workspace, "stages.train_ppo", overrides(change))
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


def result_file(workspace: Path, change: str) -> Path:
    """Where the stage writes the change's metrics."""
    return output(workspace, "train_ppo", overrides(change), "metrics/ppo.json")


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
    write_csv(TABLE, [Result._fields, *results])
    if len(results) == len(CHANGES) * len(SEEDS):
        by_change = {change: [result for result in results if result.change == change] for change in CHANGES}
        write_text(PAGE, with_marked(PAGE.read_text(), "choices", table(by_change)))


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


if __name__ == "__main__":
    stopped = "interrupted: every run that was done stays done, run it again to go on"
    sys.exit(run_command("choices", lambda: main(sys.argv[1:]), stopped))
