"""Draws what bench/frontier.py has measured: docs/img/overoptimisation.png and docs/img/frontier.png."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from bench.workspaces import write_picture
from rlhf import anchors

PPO, BEST_OF_N = "ppo", "best-of-n"
IMAGES = anchors.CHECKOUT / "docs" / "img"

SHADES = (("#f4a259", "#d9691a", "#8c3a05"), ("#7fb2e5", "#2b74c0", "#0c3c78"))
"""A hue for each number of pairs, from few to many; in it a shade for each KL coefficient, from low to high."""
FAINT = "#e2e2e2"
RUNNING = 2
"""Neighbours on either side that a running mean takes in."""
KINDS = (
    Line2D([], [], color="#555555", linewidth=2, label=f"PPO, mean of {2 * RUNNING + 1} iterations"),
    Line2D([], [], color="#555555", linestyle="", marker="o", markersize=3, alpha=0.6, label="PPO, each iteration"),
    Line2D([], [], color="#555555", linestyle="--", marker="s", markersize=5, label="best of n = 1, 2, 4, …"),
)


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
    of_ppo = [curve for curve in lines if curve.method == PPO]
    write_picture(IMAGES / "overoptimisation.png", over_optimisation(of_ppo))
    write_picture(IMAGES / "frontier.png", frontier(lines))


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
    panels: list[tuple[Axes, Callable[[Point], float]]] = [
        (top, lambda point: point.score),
        (bottom, lambda point: 100 * point.accuracy),
    ]
    for axes, value in panels:
        for curve in lines:
            axes.plot(
                [point.step for point in curve.points],
                [value(point) for point in curve.points],
                color=colour(curve, lines),
                linewidth=2,
                label=f"{curve.pairs:,} pairs, β = {curve.coef:g}",
            )
        plain(axes)
    top.set_title("What PPO is paid for: the reward model's score, normalised", loc="left")
    bottom.set_title("What is wanted: right answers among the same samples, %", loc="left")
    bottom.set_xlabel("PPO updates")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.set_ylim(0, 100)
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure


def frontier(lines: Sequence[Curve]) -> Figure:
    """True accuracy over the root of KL: PPO's iterations as dots, their running mean and best-of-n as lines."""
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    axes = figure.subplots()
    for curve in lines:
        shade = colour(curve, lines)
        if curve.method == PPO:
            axes.plot(*distances(curve.points), color=shade, linestyle="", marker="o", markersize=3, alpha=0.45)
            axes.plot(*distances(running_means(curve.points)), color=shade, linewidth=2)
            name(axes, curve, running_means(curve.points)[-1], shade)
        else:
            axes.plot(*distances(curve.points), color=shade, linewidth=1.8, linestyle="--", marker="s", markersize=5)
            name(axes, curve, curve.points[-1], shade)
    axes.set_xlabel("√KL from the SFT policy (KL in nats an answer)")
    axes.set_title("Right answers, %", loc="left")
    axes.legend(handles=[*hues(lines), *KINDS], frameon=False, loc="lower left")
    plain(axes)
    return figure


def hues(lines: Sequence[Curve]) -> list[Line2D]:
    """What the legend shows for each number of pairs, the most first."""
    counts = {curve.questions: curve.pairs for curve in lines}
    return [
        Line2D([], [], color=shades[1], linewidth=6, label=f"reward model of {counts[questions]:,} pairs")
        for questions, shades in reversed(list(zip(sorted(counts), SHADES, strict=False)))
    ]


def distances(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """The root of the KL, 0 where its estimate is negative, and the accuracy in percent."""
    return [math.sqrt(max(point.kl, 0.0)) for point in points], [100 * point.accuracy for point in points]


def running_means(points: Sequence[Point]) -> list[Point]:
    """Means of `2 RUNNING + 1` points in a row, at the start of fewer; the first point stands as it is."""
    reaches = [min(RUNNING, place) for place in range(len(points) - RUNNING)]
    return [mean_point(points[place - reach : place + reach + 1]) for place, reach in enumerate(reaches)]


def colour(curve: Curve, lines: Sequence[Curve]) -> str:
    """The hue of the curve's number of pairs, in the shade of its coefficient; the darkest for best-of-n."""
    questions = sorted({line.questions for line in lines})
    coefficients = sorted({line.coef for line in lines if line.coef is not None})
    shades = SHADES[questions.index(curve.questions)]
    return shades[-1 if curve.coef is None else coefficients.index(curve.coef)]


def name(axes: Axes, curve: Curve, end: Point, shade: str) -> None:
    """Writes what the curve is beside its end."""
    text = f"β = {curve.coef:g}" if curve.method == PPO else f"best of {end.step}"
    (x,), (y,) = distances([end])
    label = axes.annotate(text, (x, y), xytext=(7, 0), textcoords="offset points", color=shade, va="center")
    label.set_path_effects([withStroke(linewidth=3, foreground="white")])


def plain(axes: Axes) -> None:
    """Light horizontal lines, no box."""
    axes.grid(axis="y", color=FAINT)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
