"""The measures of a reward model, by hand and against scipy and a simulation of calibrated models."""

from __future__ import annotations

from math import exp, log, sqrt

import numpy as np
import pytest
from scipy.stats import binomtest, pearsonr, spearmanr

from rlhf.evaluation.preferences import (
    ScoredAnswer,
    ScoredPair,
    calibration,
    calibration_csv,
    calibration_error,
    calibration_error_by_chance,
    flat,
    length_bias,
    measure,
)
from rlhf.evaluation.statistics import wilson_interval

LOG3, LOG9 = log(3), log(9)  # sigmoid: 0.75 and 0.9


def answer(length: int, score: float, first: int = 7) -> ScoredAnswer:
    return ScoredAnswer((first, *[7] * (length - 1)), score)


def pair(better: float, worse: float, lengths: tuple[int, int] = (2, 2), question: str = "?") -> ScoredPair:
    return ScoredPair(question, answer(lengths[0], better, 8), answer(lengths[1], worse, 9))


def random_margins(count: int, seed: int = 0) -> np.ndarray:
    """Margins of a model that is calibrated: its higher score is the better answer's with probability sigmoid."""
    random = np.random.default_rng(seed)
    size = np.abs(random.normal(scale=2, size=count))
    return np.where(random.random(count) < 1 / (1 + np.exp(-size)), size, -size)


def test_accuracy_likelihood_and_margins_by_hand() -> None:
    """Probabilities of the chosen answer 3/4, 9/10, 1/4 and 1/2; equal scores are not the right order."""
    pairs = [pair(LOG3, 0), pair(5 + LOG9, 5, question="!"), pair(0, LOG3), pair(2, 2)]
    found = measure(pairs, 0.95)
    assert (found["pairs"], found["questions"], found["pair_accuracy"]) == (4, 2, 0.5)
    # Three pairs of "?" with one right, one of "!" right: d = 4 · 2/1 · ((1 - 3/2)² + (1 - 1/2)²) / (16 · 1/4) = 1.
    assert found["design_effect"] == 1
    wilson = binomtest(2, 4).proportion_ci(0.95, "wilson")
    assert [found["pair_accuracy_low"], found["pair_accuracy_high"]] == pytest.approx([*wilson], abs=1e-6)
    assert found["log_loss"] == pytest.approx(-log(0.75 * 0.9 * 0.25 * 0.5) / 4, abs=1e-6)
    assert found["log_loss_constant"] == pytest.approx(0.693147, abs=1e-6)
    assert found["margin"]["mean"] == pytest.approx(LOG9 / 4, abs=1e-6)
    assert found["margin"]["p50"] == pytest.approx(LOG3 / 2, abs=1e-6)
    squares = [(margin - LOG9 / 4) ** 2 for margin in (LOG3, LOG9, -LOG3, 0)]
    assert found["margin"]["deviation"] == pytest.approx(sqrt(sum(squares) / 4), abs=1e-6)


def test_pairs_of_a_question_that_go_together_count_as_fewer() -> None:
    """Two questions of four pairs, all right or all wrong: as much is known as of one pair, d = 8."""
    pairs = [pair(1, 0, question="a")] * 4 + [pair(0, 1, question="b")] * 4
    found = measure(pairs, 0.95)
    assert found["design_effect"] == 8
    wilson = wilson_interval(0.5, 1, 0.95)
    assert found["pair_accuracy_low"] == pytest.approx(wilson.low, abs=1e-6)


def test_huge_margins_neither_overflow_nor_leave_the_last_bin() -> None:
    found = measure([pair(1000, 0), pair(0, 1000)], 0.95)
    assert found["log_loss"] == 500
    assert found["calibration_error"] == 0.5
    assert calibration(np.array([1000.0, -1000.0]), 0.95)[-1].pairs == 2


def test_no_pairs_measure_nothing() -> None:
    assert measure([], 0.95) == {"pairs": 0, "questions": 0}
    assert calibration_csv(calibration(np.array([]), 0.95)).count("\n") == 1


def test_calibration_by_hand() -> None:
    """Confidence 0.5 (right by half), 0.75 three times of which two are right, 0.9 twice, both wrong."""
    margins = np.array([0, LOG3 + 1e-9, LOG3 + 1e-9, -LOG3 - 1e-9, -LOG9 - 1e-9, -LOG9 - 1e-9])
    table = calibration(margins, 0.95)
    filled = {round(row.above, 2): (row.pairs, row.confidence, row.accuracy) for row in table if row.pairs}
    assert filled == {
        0.5: (1, pytest.approx(0.5), 0.5),
        0.75: (3, pytest.approx(0.75), pytest.approx(2 / 3)),
        0.9: (2, pytest.approx(0.9), 0),
    }
    assert calibration_error(table) == pytest.approx((0 + 3 * (0.75 - 2 / 3) + 2 * 0.9) / 6)
    wilson = binomtest(2, 3).proportion_ci(0.95, "wilson")
    assert table[5][-2:] == pytest.approx([*wilson])
    by_chance = sum(sqrt(2 / 3.14159265 * variance) for variance in (0.25, 3 * 0.1875, 2 * 0.09)) / 6
    assert calibration_error_by_chance(margins) == pytest.approx(by_chance)


def test_calibration_is_that_of_both_orders_of_every_pair() -> None:
    """Over 20 bins of the probability that the first answer is better, each pair counted both ways round."""
    margins = random_margins(300)
    both = np.concatenate([margins, -margins])  # the first answer is the better one in the first half
    p, better = 1 / (1 + np.exp(-both)), np.arange(600) < 300
    place = np.minimum((p * 20).astype(int), 19)
    gaps = [abs(p[place == i].mean() - better[place == i].mean()) * (place == i).sum() for i in set(place)]
    assert calibration_error(calibration(margins, 0.95)) == pytest.approx(sum(gaps) / 600)


def test_the_error_by_chance_is_that_of_calibrated_models() -> None:
    errors = [calibration_error(calibration(random_margins(400, seed), 0.95)) for seed in range(300)]
    assert calibration_error_by_chance(random_margins(400)) == pytest.approx(np.mean(errors), rel=0.05)
    too_sure = calibration_error(calibration(4 * random_margins(400), 0.95))
    assert too_sure > 2 * calibration_error_by_chance(4 * random_margins(400))


def test_length_bias_by_hand() -> None:
    """Longer scores higher in two of three pairs of unequal length, and is better in one."""
    pairs = [
        pair(2.0, 1.0, (5, 3), "a"),
        pair(1.0, 2.0, (3, 4), "b"),
        pair(3.0, 2.5, (2, 6), "c"),
        pair(0.0, 0.5, (4, 4), "d"),
    ]
    found = length_bias(pairs)
    assert found["longer_scored_higher"] == pytest.approx(2 / 3)
    assert found["longer_is_better"] == pytest.approx(1 / 3)
    assert found["longer_better"] == {"pairs": 1, "accuracy": 1}
    assert found["shorter_better"] == {"pairs": 2, "accuracy": 0.5}
    assert found["equal_length"] == {"pairs": 1, "accuracy": 0}
    assert (found["right"]["answers"], found["wrong"]["answers"], found["all"]["answers"]) == (4, 4, 8)
    assert found["right"]["mean_tokens"] == 3.5
    scores, lengths = [2, 1, 3, 0], [5, 3, 2, 4]
    assert found["right"]["pearson"] == pytest.approx(pearsonr(scores, lengths).statistic)
    assert found["right"]["spearman"] == pytest.approx(spearmanr(scores, lengths).statistic)
    margins, extra = [1, -1, 0.5, -0.5], [2, -1, -4, 0]
    assert found["margin"]["pearson"] == pytest.approx(pearsonr(margins, extra).statistic)


def test_an_answer_in_several_pairs_counts_once() -> None:
    chosen, worst = answer(3, 1.0, 8), answer(2, 0.0, 9)
    pairs = [ScoredPair("a", chosen, worst), ScoredPair("a", chosen, answer(4, 0.5, 9)), ScoredPair("b", chosen, worst)]
    found = length_bias(pairs)
    assert (found["right"]["answers"], found["wrong"]["answers"]) == (2, 3)


def test_what_cannot_be_told_is_none_and_not_logged() -> None:
    found = measure([pair(1, 0)], 0.95)
    assert found["length"]["longer_scored_higher"] is found["length"]["right"]["pearson"] is None
    numbers = flat(found)
    assert numbers["held_out/pair_accuracy"] == numbers["held_out/length/equal_length/accuracy"] == 1
    assert numbers["held_out/margin/mean"] == 1
    assert not [name for name in numbers if name.endswith(("pearson", "longer_scored_higher"))]


def test_the_table_holds_bins_with_pairs_alone() -> None:
    header, row = calibration_csv(calibration(np.array([1.0]), 0.95)).splitlines()
    assert header == "above,below,pairs,confidence,accuracy,low,high"
    above, below, count, confidence, accuracy, *_ = row.split(",")
    assert (float(above), float(below), count, float(accuracy)) == (0.7, 0.75, "1", 1)
    assert float(confidence) == pytest.approx(1 / (1 + exp(-1)), abs=1e-6)
