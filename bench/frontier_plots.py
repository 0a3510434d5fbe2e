"""Draws what bench/frontier.py has measured: docs/img/overoptimisation.png and docs/img/frontier.png."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhf import anchors

PPO, BEST_OF_N = "ppo", "best-of-n"
IMAGES = anchors.CHECKOUT / "docs" / "img"

SHADES = (("#f4a259", "#d9691a", "#8c3a05"), ("#7fb2e5", "#2b74c0", "#0c3c78"))
"""A hue for each number of pairs, from few to many; in it a shade for each KL coefficient, from low to high."""
INK, FAINT = "#222222", "#e2e2e2"


class Point(NamedTuple):
    """A policy, or the best of n answers, as measured.

    Attributes:
        method: PPO or BEST_OF_N.
        questions, pairs: what the reward model was trained on.
        coef: PPO's KL coefficient; None for best-of-n.
        step: PPO's updates so far, or n.
        kl: from the SFT policy, in nats an answer: PPO's as its rollouts estimate it, best-of-n's by formula.
        score: mean normalised reward-model score of answers sampled at temperature 1.
        accuracy: share of these answers that the verifier finds right.
        greedy: the policy's greedy accuracy on validation; None for best-of-n.
    """

    method: str
    questions: int
    pairs: int
    seed: int
    coef: float | None
    step: int
    kl: float
    score: float
    accuracy: float
    greedy: float | None


class Curve(NamedTuple):
    """One line of a plot: the points of one setting, their mean over seeds where there are several."""

    method: str
    questions: int
    pairs: int
    coef: float | None
    points: list[Point]


def draw(points: Sequence[Point]) -> None:
    """Writes both plots."""
    lines = curves(points)
    save(over_optimisation([curve for curve in lines if curve.method == PPO]), IMAGES / "overoptimisation.png")
    save(frontier(lines), IMAGES / "frontier.png")


def curves(points: Sequence[Point]) -> list[Curve]:
    """The points by method, questions and coefficient, in this order; each curve by its steps."""
    keys = sorted({(p.method, p.questions, p.coef or 0.0) for p in points}, key=lambda key: (key[0] != PPO, *key[1:]))
    return [_curve([p for p in points if (p.method, p.questions, p.coef or 0.0) == key]) for key in keys]


def _curve(points: Sequence[Point]) -> Curve:
    steps = sorted({point.step for point in points})
    means = [mean_point([point for point in points if point.step == step]) for step in steps]
    first = means[0]
    return Curve(first.method, first.questions, first.pairs, first.coef, means)


def mean_point(points: Sequence[Point]) -> Point:
    """The mean over seeds of points that differ in nothing else."""
    greedy = [point.greedy for point in points if point.greedy is not None]
    return points[0]._replace(
        pairs=round(fmean(point.pairs for point in points)),
        kl=fmean(point.kl for point in points),
        score=fmean(point.score for point in points),
        accuracy=fmean(point.accuracy for point in points),
        greedy=fmean(greedy) if greedy else None,
    )


def over_optimisation(lines: Sequence[Curve]) -> Figure:
    """Reward-model score above, true accuracy below, over PPO's updates."""
    figure = Figure(figsize=(9, 7.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    panels: list[tuple[Axes, str, Callable[[Point], float]]] = [
        (top, "reward-model score (normalised)", lambda point: point.score),
        (bottom, "right answers, %", lambda point: 100 * point.accuracy),
    ]
    for axes, label, value in panels:
        for curve in lines:
            axes.plot(
                [point.step for point in curve.points],
                [value(point) for point in curve.points],
                color=colour(curve, lines),
                linewidth=2,
                label=f"{pairs(curve)}, β = {curve.coef:g}",
            )
        axes.set_ylabel(label)
        plain(axes)
    top.set_title("What PPO is paid for goes on rising …", loc="left")
    bottom.set_title("… while what is wanted falls", loc="left")
    bottom.set_xlabel("PPO updates")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.set_ylim(0, 100)
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure


def frontier(lines: Sequence[Curve]) -> Figure:
    """True accuracy over the root of KL: a line for each PPO run and for best-of-n with each reward model."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for curve in lines:
        best = curve.method == BEST_OF_N
        axes.plot(
            [math.sqrt(max(point.kl, 0.0)) for point in curve.points],
            [100 * point.accuracy for point in curve.points],
            color=colour(curve, lines),
            linewidth=2 if best else 0.8,
            linestyle="--" if best else "-",
            marker="s" if best else "o",
            markersize=5,
            label=f"{pairs(curve)}, " + ("best of n" if best else f"PPO, β = {curve.coef:g}"),
        )
    axes.set_xlabel("√KL from the SFT policy (KL in nats an answer)")
    axes.set_ylabel("right answers, %")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    plain(axes)
    return figure


def colour(curve: Curve, lines: Sequence[Curve]) -> str:
    """The hue of the curve's number of pairs, in the shade of its coefficient; the darkest for best-of-n."""
    questions = sorted({line.questions for line in lines})
    coefficients = sorted({line.coef for line in lines if line.coef is not None})
    shades = SHADES[questions.index(curve.questions)]
    return shades[-1 if curve.coef is None else coefficients.index(curve.coef)]


def pairs(curve: Curve) -> str:
    """How many pairs, to two figures where that is a mean over seeds."""
    return f"{curve.pairs:,} pairs"


def plain(axes: Axes) -> None:
    """Light horizontal lines, no box."""
    axes.grid(axis="y", color=FAINT)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Writes the picture whole or not at all; the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.new")
    figure.savefig(written, format="png", dpi=120, metadata={"Software": None})
    written.replace(path)
