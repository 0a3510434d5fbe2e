"""Draws the learning curves of docs/results.md: docs/img/learning.png from bench/results/curves/CHOICE-SEED.csv.

    python -m bench.curves

Each file is a run's plots/ppo.csv: `make run seed=0 kl=loss; cp plots/ppo.csv bench/results/curves/kl-loss-0.csv`.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bench.workspaces import RESULTS, write_picture
from rlhf import anchors
from rlhf.errors import UserError, run_command

CURVES = RESULTS / "curves"
PICTURE = anchors.CHECKOUT / "docs" / "img" / "learning.png"
COLOURS = ("#1f5fbf", "#b0470b", "#1c7040")
COLUMNS = 4


class Curve(NamedTuple):
    """Accuracies in percent by iteration, of the sampled rollouts and of greedy validation."""

    rollouts: dict[int, float]
    validation: dict[int, float]


def main() -> int:
    """Draws the picture; returns the exit code."""
    draw(read_curves(CURVES), PICTURE)
    return 0


def read_curves(directory: Path) -> dict[str, dict[int, Curve]]:
    """Choice -> seed -> its curve; raises UserError where a file's name or table is none of ours."""
    curves: dict[str, dict[int, Curve]] = {}
    for path in sorted(directory.glob("*.csv")):
        choice, _, seed = path.stem.rpartition("-")
        if not choice or not seed.isdigit():
            raise UserError(f"{path.name}: no CHOICE-SEED.csv: rename it")
        curves.setdefault(choice, {})[int(seed)] = read_curve(path)
    if not curves:
        raise UserError(f"{directory}: no curves: copy plots/ppo.csv of runs there as CHOICE-SEED.csv")
    return curves


def read_curve(path: Path) -> Curve:
    """The curve in a copy of plots/ppo.csv."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"iteration", "accuracy", "validation_accuracy"} <= rows[0].keys():
        raise UserError(f"{path.name}: not a run's plots/ppo.csv: copy it again")
    return Curve(_column(rows, "accuracy"), _column(rows, "validation_accuracy"))


def _column(rows: list[dict[str, str]], name: str) -> dict[int, float]:
    return {int(row["iteration"]): 100 * float(row[name]) for row in rows if row[name]}


def draw(curves: Mapping[str, Mapping[int, Curve]], picture: Path) -> None:
    """One panel a choice, one colour a seed: a line for the sampled rollouts, dots for greedy validation."""
    from matplotlib.figure import Figure  # seconds to import
    from matplotlib.ticker import MaxNLocator

    lines = -(-len(curves) // COLUMNS)
    figure = Figure(figsize=(3.1 * COLUMNS, 2.6 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, COLUMNS, sharex=True, sharey=True, squeeze=False).flat
    for (choice, seeds), panel in zip(curves.items(), panels, strict=False):
        for (seed, curve), colour in zip(sorted(seeds.items()), COLOURS, strict=False):
            panel.plot(list(curve.rollouts), list(curve.rollouts.values()), color=colour, label=f"seed {seed}")
            panel.plot(list(curve.validation), list(curve.validation.values()), "o", color=colour, markersize=5)
        panel.set_title(choice, fontsize=11, loc="left")
        panel.set_ylim(0, 100)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(color="#ececef")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels:
        panel.set_axis_off()
    figure.supxlabel("iteration", fontsize=10)
    figure.supylabel("right answers, %", fontsize=10)
    figure.axes[0].legend(frameon=False, fontsize=9, loc="lower right")
    write_picture(picture, figure)


if __name__ == "__main__":
    sys.exit(run_command("curves", main))
