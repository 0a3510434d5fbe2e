"""The geometry of the report's line charts; `report.html.j2` draws it as SVG, without any script.

Coordinates are pixels in a drawing `WIDTH` by `HEIGHT`, y downwards. A strip on top holds the readout: the values of
the iteration under the pointer, or else the last ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 350, 30, 184
MOST_READOUTS = 100
MOST_DECIMALS = 4
DENSE = 40
"""A line with more points than this is drawn without dots."""

Row = Mapping[str, str]
"""A row of `plots/ppo.csv` as text; an empty text is no value."""


@dataclass(frozen=True)
class Figure:
    """What to draw from `plots/ppo.csv`: one line for each of `columns`, named in the readout."""

    title: str
    note: str
    columns: Mapping[str, str]
    """Column name -> name of the line; an only line needs none."""
    percent: bool = False


PPO_FIGURES = (
    Figure("Accuracy", "share of right answers", {"accuracy": "rollouts", "validation_accuracy": "validation"}, True),
    Figure("Reward", "mean score of a response", {"score": ""}),
    Figure("KL to the reference", "nats a response", {"kl_sequence": ""}),
    Figure("Clip fraction", "share of tokens whose ratio was clipped", {"clip_fraction": ""}, True),
    Figure("Response length", "mean tokens", {"response_length": ""}),
    Figure("Cut off", "share of responses ended by the length limit", {"cut_off": ""}, True),
    Figure("Entropy", "nats a token", {"entropy": ""}),
    Figure("Explained variance", "of the returns, by the critic; 1 is perfect", {"explained_variance": ""}),
    Figure("Policy loss", "clipped surrogate", {"policy_loss": ""}),
    Figure("Value loss", "squared error, halved", {"value_loss": ""}),
    Figure("Approximate KL", "old policy to new within an update, nats a token", {"approx_kl": ""}),
    Figure("KL coefficient", "weight of the KL in the reward", {"kl_coef": ""}),
)


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Line:
    path: str
    """The `d` of an SVG path."""
    dots: list[tuple[float, float]]


@dataclass(frozen=True)
class Reading:
    """One line's value in a readout."""

    line: int
    name: str
    text: str
    y: float


@dataclass(frozen=True)
class Readout:
    """The band from `left` that answers to the pointer, the x of its iteration, and what to show."""

    iteration: int
    x: float
    left: float
    width: float
    readings: list[Reading]


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    readouts: list[Readout]
    last: list[Reading]
    mark: float | None
    """x of the marked iteration."""


def ppo_charts(rows: Sequence[Row], marked: int | None) -> list[Chart]:
    """The charts of a training run, those without any value left out; `marked` is the selected iteration."""
    charts = (line_chart(figure, rows, marked) for figure in PPO_FIGURES)
    return [chart for chart in charts if chart]


def line_chart(figure: Figure, rows: Sequence[Row], marked: int | None) -> Chart | None:
    """`figure` over the column `iteration`; None where its columns hold no finite value.

    Shares are drawn from zero, and so is a line that never moves; the others fill the height.
    """
    series = [dict(_points(rows, column)) for column in figure.columns]
    values = [value for points in series for value in points.values()]
    if not values:
        return None
    if figure.percent or len(set(values)) == 1:
        values.append(0.0)
    x_low, x_high = int(rows[0]["iteration"]), max(int(rows[-1]["iteration"]), 1)
    y_values, y_step = nice_scale(min(values), max(values))

    def x(iteration: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (iteration - x_low) / (x_high - x_low), 1)

    def y(value: float) -> float:
        share = (value - y_values[0]) / (y_values[-1] - y_values[0])
        return round(BOTTOM - (BOTTOM - TOP) * share, 1)

    def readings(chosen: Sequence[int | None]) -> list[Reading]:
        return [
            Reading(line, name, _text(points[at], y_step, figure.percent, 1), y(points[at]))
            for line, (name, points, at) in enumerate(zip(figure.columns.values(), series, chosen, strict=True))
            if at is not None and at in points
        ]

    x_values, x_step = nice_scale(x_low, x_high, smallest_step=1)
    return Chart(
        title=figure.title,
        note=figure.note,
        lines=[_line([(x(at), y(value)) for at, value in points.items()]) for points in series],
        x_ticks=[Tick(x(at), _text(at, x_step)) for at in x_values if x_low <= at <= x_high],
        y_ticks=[Tick(y(value), _text(value, y_step, figure.percent)) for value in y_values],
        readouts=[
            Readout(at, x(at), left, width, readings([at] * len(series)))
            for at, left, width in _bands([(at, x(at)) for at in _thinned(sorted(set().union(*series)))])
        ],
        last=readings([max(points, default=None) for points in series]),
        mark=x(marked) if marked is not None and x_low <= marked <= x_high else None,
    )


def nice_scale(low: float, high: float, smallest_step: float = 0.0) -> tuple[list[float], float]:
    """Round values a round step apart (1, 2 or 5 times a power of ten) that span [low, high], and the step."""
    span = (high - low) or abs(high) or 1.0
    rough = max(span / 4, smallest_step)
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [step * index for index in range(first, max(last, first + 1) + 1)], step


def _points(rows: Sequence[Row], column: str) -> Iterator[tuple[int, float]]:
    for row in rows:
        text = row.get(column) or ""
        if text and isfinite(float(text)):
            yield int(row["iteration"]), float(text)


def _line(points: list[tuple[float, float]]) -> Line:
    path = " ".join(f"{'L' if index else 'M'}{x:g},{y:g}" for index, (x, y) in enumerate(points))
    return Line(path, points if len(points) <= DENSE else [])


def _thinned(iterations: Sequence[int]) -> Sequence[int]:
    return iterations[:: ceil(len(iterations) / MOST_READOUTS)]


def _bands(positions: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float, float]]:
    """(iteration, left, width) of bands that meet halfway between neighbours and cover the plot."""
    middles = [(a + b) / 2 for (_, a), (_, b) in pairwise(positions)]
    edges = [LEFT, *middles, RIGHT]
    for (iteration, _), left, right in zip(positions, edges, edges[1:], strict=False):
        yield iteration, round(left, 1), round(right - left, 1)


def _text(value: float, step: float, percent: bool = False, more_digits: int = 0) -> str:
    """`value` with the digits that `step` asks for, a real minus sign, and no minus zero."""
    scale = 100 if percent else 1
    digits = max(0, -floor(log10(step * scale) + 1e-9))
    scientific = digits > MOST_DECIMALS
    text = f"{abs(value * scale):.{more_digits if scientific else digits + more_digits}{'e' if scientific else 'f'}}"
    sign = "−" if value < 0 and float(text) else ""
    return f"{sign}{text}{' %' if percent else ''}"
