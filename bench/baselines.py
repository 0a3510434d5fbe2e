"""Measures PPO beside other ways to use as many samples of the SFT policy, at tiny scale, over three seeds.

    python -m bench.baselines

Each seed has a workspace (bench/workspaces.py), where data, SFT model and PPO's policy are made by their stages; the
other methods are runs of bench/baseline_runs.py there. The setting of a method is the one of its grid that validates
best with the first seed. What is done is not made again. It writes bench/results/baselines.csv after every run, and the
table in docs/results.md once all rows are there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from bench.repeated_samples import Answered, majority_is_right, mean_interval, passes
from bench.workspaces import CODE, RESULTS, measuring, prepare, run, with_marked, write_csv, write_text
from rlhf import anchors
from rlhf.errors import run_command
from rlhf.evaluation.accuracy import Graded
from rlhf.evaluation.statistics import compare

Setting = tuple[str, ...]


class Baseline(NamedTuple):
    """A method, and the settings that it is tried with: what `bench.baseline_runs` is told after the directory."""

    method: str
    grid: tuple[Setting, ...]


BASELINES = {
    "rejection-sampling SFT": Baseline(
        "rejection",
        (
            ("rounds=1", "epochs=2", "sft.finetune.lr=0.001"),
            ("rounds=1", "epochs=6", "sft.finetune.lr=0.001"),
            ("rounds=1", "epochs=6", "sft.finetune.lr=0.003"),
        ),
    ),
    "expert iteration, 4 rounds": Baseline(
        "rejection",
        (("rounds=4", "epochs=2", "sft.finetune.lr=0.0003"), ("rounds=4", "epochs=2", "sft.finetune.lr=0.001")),
    ),
    "RLOO": Baseline(
        "rloo",
        (
            ("ppo.epochs=1", "ppo.lr=0.0001"),
            ("ppo.epochs=1", "ppo.lr=0.0003"),
            ("ppo.epochs=3", "ppo.lr=0.00003"),
            ("ppo.epochs=3", "ppo.lr=0.0001"),
        ),
    ),
}
SEEDS = (0, 1, 2)
KS = (1, 2, 4, 8, 16, 32)
STAGES = ("prepare_data", "fetch_sft", "finetune_sft", "train_ppo")
OWN = (*CODE, "bench/__init__.py", *(f"bench/{name}.py" for name in ("baseline_methods", "baseline_runs", "best_of_n")))
CONFIDENCE = 0.95
TABLE = RESULTS / "baselines.csv"
PAGE = anchors.CHECKOUT / "docs" / "results.md"


class Row(NamedTuple):
    """What a method comes to with one seed, in shares of the test problems.

    `low` to `high` is the interval of the accuracy; the paired gain over the SFT start is that of methods that train.
    """

    method: str
    seed: int
    accuracy: float
    low: float
    high: float
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    setting: str = ""


def main() -> int:
    """Makes the runs that are missing; returns the exit code."""
    with measuring("baselines", OWN) as root:
        rows = measure(root)
    write_text(PAGE, with_marked(PAGE.read_text(), "baselines", table(rows)))
    return 0


def measure(root: Path) -> list[Row]:
    """All rows, seed by seed; bench/results/baselines.csv is written after each."""
    rows: list[Row] = []
    chosen: dict[str, Setting] = {}
    for seed in SEEDS:
        workspace = prepare(root, f"seed-{seed}", ["scale=tiny", f"seed={seed}"], STAGES, OWN)
        sft = answers(workspace, "sft", "models/sft")
        rows += [
            compared("SFT", seed, sft, sft),
            compared("PPO", seed, sft, answers(workspace, "ppo", "models/policy")),
        ]
        for name, baseline in BASELINES.items():
            if name not in chosen:
                chosen[name] = best_setting(workspace, baseline)
            place = train(workspace, baseline.method, chosen[name])
            policy = answers(workspace, place.name, f"{place.relative_to(workspace)}/policy")
            rows += [compared(name, seed, sft, policy)._replace(setting=" ".join(chosen[name]))]
        rows += repeated(workspace, seed)
        write_rows(rows)
    return rows


def best_setting(workspace: Path, baseline: Baseline) -> Setting:
    """The setting of the grid whose selected policy validates best; the first among equals."""
    values = {setting: _validated(train(workspace, baseline.method, setting)) for setting in baseline.grid}
    return max(values, key=values.__getitem__)


def train(workspace: Path, method: str, setting: Setting) -> Path:
    """The directory of the run, which is made if it is not there."""
    place = workspace / "baselines" / "-".join((method, *setting)).replace("/", "_")
    if not place.is_dir():
        start = time.monotonic()
        run(workspace, "bench.baseline_runs", [method, str(place.relative_to(workspace)), *setting])
        said = f"{workspace.name} {' '.join((method, *setting))}: validation {100 * _validated(place):.1f} %"
        print(f"baselines: {said} ({time.monotonic() - start:.0f} s)", flush=True)
    return place


def answers(workspace: Path, name: str, checkpoint: str) -> list[Graded]:
    """The checkpoint's greedy answers to the test problems."""
    return [Graded(**row) for row in _rows(workspace, f"answers/{name}.json", ["answer", checkpoint])]


def repeated(workspace: Path, seed: int) -> list[Row]:
    """The SFT policy's pass@k and majority@k on the test problems, with normal intervals over problems."""
    found = [Answered(**row) for row in _rows(workspace, "answers/samples.json", ["sample"])]
    measures = {"pass": passes, "majority": majority_is_right}
    return [
        Row(f"SFT, {name}@{k}", seed, *mean_interval([measure(answered, k) for answered in found], CONFIDENCE))
        for name, measure in measures.items()
        for k in KS
    ]


def compared(name: str, seed: int, sft: Sequence[Graded], policy: Sequence[Graded]) -> Row:
    """The paired comparison with the SFT start."""
    found = compare(sft, policy, "strict", CONFIDENCE)
    accuracy = (found["policy"][key] for key in ("accuracy", "low", "high"))
    return Row(name, seed, *accuracy, *(found[key] for key in ("gain", "gain_low", "gain_high")))


def write_rows(rows: Sequence[Row]) -> None:
    """bench/results/baselines.csv."""
    rounded = [[round(cell, 6) if isinstance(cell, float) else cell for cell in row] for row in rows]
    write_csv(TABLE, [Row._fields, *rounded])


def table(rows: Sequence[Row]) -> str:
    """Markdown: of each method the accuracy and gain by seed and the mean gain; of repeated samples the accuracy."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row.method, []).append(row)
    seeds = " | ".join(f"seed {seed}" for seed in SEEDS)
    lines = [f"| right on test, % | {seeds} | mean | mean gain |", "| --- |" + " --- |" * (len(SEEDS) + 2)]
    for method, runs in by_method.items():
        setting = f" (`{runs[0].setting}`)" if runs[0].setting else ""
        gains = [row.gain for row in runs if row.gain]
        gain = f"{100 * fmean(gains):.1f}" if gains else ""
        mean = f"{100 * fmean(row.accuracy for row in runs):.1f}"
        lines.append(f"| {method}{setting} | {' | '.join(map(_cell, runs))} | {mean} | {gain} |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    """The accuracy; with the gain over the start, where the method trains."""
    if not row.gain:
        return f"{100 * row.accuracy:.1f}"
    gain, low, high = (100 * (value or 0) for value in (row.gain, row.gain_low, row.gain_high))
    return f"{100 * row.accuracy:.1f}: {gain:+.1f} [{low:.1f}, {high:.1f}]"


def _validated(place: Path) -> float:
    training: Mapping[str, Any] = json.loads((place / "training.json").read_text())
    return float(training["validation"][training["selected"]])


def _rows(workspace: Path, name: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON rows of the file, which is made by the run if it is not there."""
    file = workspace / name
    if not file.is_file():
        run(workspace, "bench.baseline_runs", [*arguments, name])
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return rows


if __name__ == "__main__":
    sys.exit(run_command("baselines", main, "interrupted: every run that was done stays done, run it again to go on"))
