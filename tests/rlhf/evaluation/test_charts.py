from __future__ import annotations

import pytest

from rlhf.evaluation.charts import (
    BOTTOM,
    LEFT,
    MOST_READOUTS,
    PPO_FIGURES,
    RIGHT,
    TOP,
    Chart,
    Figure,
    line_chart,
    nice_scale,
    ppo_charts,
)

SCORE = Figure("Reward", "", {"score": ""})
SHARE = Figure("Cut off", "", {"cut_off": ""}, percent=True)


def chart(figure: Figure, rows: list[dict[str, str]], marked: int | None = None) -> Chart:
    drawn = line_chart(figure, rows, marked)
    assert drawn is not None
    return drawn


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (0, 4, [0, 1, 2, 3, 4]),
        (0.31, 0.74, [0.2, 0.4, 0.6, 0.8]),
        (-0.3, 0.2, [-0.4, -0.2, 0.0, 0.2]),
        (0, 0, [0, 0.5]),
        (300, 300, [300, 400]),
    ],
)
def test_nice_scale_spans_the_values_in_round_steps(low: float, high: float, values: list[float]) -> None:
    scale, step = nice_scale(low, high)
    assert scale[0] <= low
    assert scale[-1] >= high
    assert scale == pytest.approx(values)
    assert step == pytest.approx(values[1] - values[0])


def test_points_are_placed_by_iteration_and_value() -> None:
    drawn = chart(SCORE, [{"iteration": str(i), "score": str(i)} for i in range(5)])
    assert drawn.lines[0].dots[0] == (LEFT, BOTTOM)
    assert drawn.lines[0].dots[-1] == (RIGHT, TOP)
    assert drawn.lines[0].dots[2] == ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2)
    assert drawn.lines[0].path.startswith(f"M{LEFT},{BOTTOM} L")
    assert [tick.label for tick in drawn.y_ticks] == ["0", "1", "2", "3", "4"]


def test_every_chart_of_a_run_has_the_same_iterations() -> None:
    rows = [{"iteration": "0", "score": ""}, {"iteration": "1", "score": "1"}, {"iteration": "2", "score": "2"}]
    drawn = chart(SCORE, rows, marked=1)
    assert drawn.lines[0].dots[0][0] == drawn.mark == (LEFT + RIGHT) / 2
    assert [tick.label for tick in drawn.x_ticks] == ["0", "1", "2"]


def test_missing_and_non_finite_values_are_left_out() -> None:
    rows = [{"iteration": "0", "score": "nan"}, {"iteration": "1", "score": "2"}, {"iteration": "2", "score": ""}]
    assert len(chart(SCORE, rows).lines[0].dots) == 1
    assert line_chart(SCORE, rows[:1], None) is None
    assert line_chart(SHARE, rows, None) is None


def test_two_lines_share_readouts_and_show_their_last_values() -> None:
    rows = [
        {"iteration": "0", "accuracy": "", "validation_accuracy": "0.31"},
        {"iteration": "1", "accuracy": "0.5", "validation_accuracy": ""},
        {"iteration": "2", "accuracy": "0.6", "validation_accuracy": "0.75"},
        {"iteration": "3", "accuracy": "0.7", "validation_accuracy": ""},
    ]
    drawn = chart(PPO_FIGURES[0], rows)
    assert [(reading.name, reading.text) for reading in drawn.last] == [
        ("rollouts", "70.0 %"),
        ("validation", "75.0 %"),
    ]
    shown = [[(reading.line, reading.text) for reading in readout.readings] for readout in drawn.readouts]
    assert shown == [[(1, "31.0 %")], [(0, "50.0 %")], [(0, "60.0 %"), (1, "75.0 %")], [(0, "70.0 %")]]


def test_readout_bands_cover_the_plot_without_a_gap() -> None:
    rows = [{"iteration": str(i), "score": str(i * i)} for i in range(3 * MOST_READOUTS)]
    drawn = chart(SCORE, rows)
    assert len(drawn.readouts) == MOST_READOUTS
    assert drawn.lines[0].dots == []
    position = float(LEFT)
    for readout in drawn.readouts:
        assert readout.left == pytest.approx(position, abs=0.11)
        assert readout.left - 0.1 <= readout.x <= readout.left + readout.width + 0.1
        position = readout.left + readout.width
    assert position == pytest.approx(RIGHT, abs=0.11)


def test_shares_and_constant_lines_start_at_zero() -> None:
    assert (
        chart(SHARE, [{"iteration": "0", "cut_off": "0.5"}, {"iteration": "1", "cut_off": "0.6"}]).y_ticks[0].label
        == "0 %"
    )
    assert chart(SCORE, [{"iteration": "0", "score": "7"}, {"iteration": "1", "score": "7"}]).y_ticks[0].label == "0"


def test_labels_carry_the_digits_that_the_scale_asks_for() -> None:
    losses = [{"iteration": "0", "score": "-0.03"}, {"iteration": "1", "score": "0.01"}]
    assert [tick.label for tick in chart(SCORE, losses).y_ticks] == ["−0.03", "−0.02", "−0.01", "0.00", "0.01"]
    tiny = [{"iteration": "0", "score": "1e-6"}, {"iteration": "1", "score": "3e-6"}]
    assert chart(SCORE, tiny).y_ticks[0].label == "1e-06"


def test_one_iteration_is_enough() -> None:
    drawn = chart(SCORE, [{"iteration": "0", "score": "0.4"}], marked=0)
    assert drawn.lines[0].dots == [(LEFT, TOP)]
    assert drawn.mark == LEFT


def test_a_run_draws_the_figures_that_have_values() -> None:
    assert [drawn.title for drawn in ppo_charts([{"iteration": "0", "score": "1", "kl_sequence": "2"}], None)] == [
        "Reward",
        "KL to the reference",
    ]
