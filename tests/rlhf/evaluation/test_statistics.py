from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest, norm

from rlhf.evaluation.accuracy import Graded
from rlhf.evaluation.statistics import (
    Interval,
    PairedTable,
    accuracies_csv,
    compare,
    design_effect,
    flat,
    gain_interval,
    mcnemar_p_value,
    paired_table,
    wilson_interval,
)


def approx(low: float, high: float, tolerance: float = 5e-5) -> Interval:
    return pytest.approx((low, high), abs=tolerance)  # type: ignore[return-value]


def ends(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high


def test_wilson_interval_of_published_examples() -> None:
    # Newcombe (1998), "Two-sided confidence intervals for the single proportion", Table I, method 3.
    assert ends(wilson_interval(81, 263, 0.95)) == approx(0.2553, 0.3662)
    assert ends(wilson_interval(15, 148, 0.95)) == approx(0.0624, 0.1605)
    assert ends(wilson_interval(0, 20, 0.95)) == approx(0.0, 0.1611)
    assert ends(wilson_interval(1, 29, 0.95)) == approx(0.0061, 0.1718)


def test_wilson_interval_worked_out_by_hand() -> None:
    # 1 of 2 at the confidence where z = 1: (1/2 + 1/4 ± sqrt(1/8 + 1/16)) / (1 + 1/2) = 1/2 ± 1/sqrt(12).
    confidence = norm.cdf(1) - norm.cdf(-1)
    assert ends(wilson_interval(1, 2, confidence)) == approx(0.5 - 12**-0.5, 0.5 + 12**-0.5, 1e-9)


def test_wilson_interval_is_scipys() -> None:
    for successes, n, confidence in [(0, 1, 0.95), (1, 1, 0.9), (7, 9, 0.8), (499, 500, 0.99)]:
        expected = binomtest(successes, n).proportion_ci(confidence, "wilson")
        assert ends(wilson_interval(successes, n, confidence)) == pytest.approx([*expected], abs=1e-12)


def test_design_effect_by_hand() -> None:
    """Sizes 2, 2, 4 with 2, 1, 1 right: p = 1/2, squares 1 + 0 + 1, d = 3/2 · 2 / (8 · 1/4) = 3/2."""
    assert design_effect([2, 1, 1], [2, 2, 4]) == pytest.approx(1.5)


def test_design_effect_at_its_ends() -> None:
    assert design_effect([1, 1, 1], [2, 2, 2]) == 1  # more even than chance counts as chance
    assert design_effect([2, 4], [2, 4]) == pytest.approx(20 / 6)  # all right: nothing is known of the variance
    assert design_effect([0, 0], [1, 1]) == 1
    assert design_effect([3], [4]) == 4


def clusters(random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """200 questions of 1 to 6 trials, nine of ten right; a question's go together two times in three."""
    sizes = random.integers(1, 7, 200)
    together, shared = random.random(200) < 2 / 3, random.random(200) < 0.9
    return np.where(together, shared * sizes, random.binomial(sizes, 0.9)), sizes


def test_design_effect_is_that_of_the_bootstrap_over_clusters() -> None:
    random = np.random.default_rng(0)
    right, sizes = clusters(random)
    drawn = random.integers(0, len(sizes), (20_000, len(sizes)))
    shares = right[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    share = right.sum() / sizes.sum()
    expected = shares.var() / (share * (1 - share) / sizes.sum())
    assert expected > 2
    assert design_effect(right.tolist(), sizes.tolist()) == pytest.approx(expected, rel=0.05)


def test_intervals_of_clusters_hold_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    held = plain = 0
    for _ in range(400):
        right, sizes = clusters(random)
        effect = design_effect(right.tolist(), sizes.tolist())
        interval = wilson_interval(right.sum() / effect, sizes.sum() / effect, 0.95)
        naive = wilson_interval(right.sum(), sizes.sum(), 0.95)
        held += interval.low <= 0.9 <= interval.high
        plain += naive.low <= 0.9 <= naive.high
    assert 0.92 <= held / 400 <= 0.98
    assert plain / 400 < 0.88


def test_gain_interval_of_published_examples() -> None:
    # Newcombe (1998), "... based on paired data": cells (36, 12, 2, 0).
    assert ends(gain_interval(PairedTable(36, 12, 2, 0), 0.95)) == approx(0.0569, 0.3404)
    # Fagerland, Lydersen and Laake (2014): airway hyper-responsiveness, and complete response to therapy.
    assert ends(gain_interval(PairedTable(1, 1, 7, 12), 0.95)) == approx(-0.5069, -0.0256)
    assert ends(gain_interval(PairedTable(59, 6, 16, 80), 0.95)) == approx(-0.1186, -0.0046)
    # Altman, Machin, Bryant and Gardner, "Statistics with confidence" (2000), Table 6.2: (14, 5, 0, 22).
    assert ends(gain_interval(PairedTable(14, 5, 0, 22), 0.95)) == approx(0.0115, 0.2265)


def test_gain_interval_worked_out_by_hand() -> None:
    # z = 1, n = 2, one gained and one lost: both accuracies 1/2, each Wilson limit 1/sqrt(12) away, and
    # phi = (0·0 - 1·1) / sqrt(1·1·1·1) = -1, so the limits add up: ± 2/sqrt(12).
    confidence = norm.cdf(1) - norm.cdf(-1)
    assert ends(gain_interval(PairedTable(0, 1, 1, 0), confidence)) == approx(-(3**-0.5), 3**-0.5, 1e-9)


def test_gain_interval_narrows_with_positive_correlation_only_beyond_the_continuity_correction() -> None:
    # covariance 2·2 - 1·1 = 3 is at most n / 2 = 3: it counts as 0, and the limits add in squares.
    table = PairedTable(2, 1, 1, 2)
    wilson = wilson_interval(3, 6, 0.95)
    assert ends(gain_interval(table, 0.95)) == approx(
        -(2**0.5) * (0.5 - wilson.low), 2**0.5 * (wilson.high - 0.5), 1e-9
    )
    narrow, wide = gain_interval(PairedTable(40, 10, 10, 40), 0.95), gain_interval(PairedTable(25, 25, 25, 25), 0.95)
    assert narrow.high < wide.high


@pytest.mark.parametrize("cells", [(5, 0, 0, 0), (0, 0, 0, 5), (0, 5, 0, 0), (0, 0, 5, 0)])
def test_gain_interval_of_one_sided_tables_holds_the_gain(cells: tuple[int, int, int, int]) -> None:
    table = PairedTable(*cells)
    interval = gain_interval(table, 0.95)
    assert -1 <= interval.low <= table.gain <= interval.high <= 1


def test_a_higher_confidence_widens_the_gain_interval() -> None:
    table = PairedTable(10, 20, 5, 15)
    assert gain_interval(table, 0.99).low < gain_interval(table, 0.9).low < table.gain


def test_mcnemar_worked_out_by_hand() -> None:
    # Of 4 changes 3 are gains: (C(4,3) + C(4,4)) / 2^4 = 5/16. Problems that did not change do not matter.
    assert mcnemar_p_value(PairedTable(7, 3, 1, 9)) == pytest.approx(5 / 16)
    assert mcnemar_p_value(PairedTable(0, 3, 1, 0)) == pytest.approx(5 / 16)
    # Losses speak against the policy: 1 - P(X = 0) = 15/16.
    assert mcnemar_p_value(PairedTable(7, 1, 3, 9)) == pytest.approx(15 / 16)
    assert mcnemar_p_value(PairedTable(7, 0, 0, 9)) == 1.0


def test_mcnemar_is_half_of_the_published_two_sided_value() -> None:
    # Fagerland, Lydersen and Laake (2013), airway hyper-responsiveness: 1 and 7 changed, exact two-sided P = 0.0703.
    assert 2 * mcnemar_p_value(PairedTable(1, 7, 1, 12)) == pytest.approx(0.0703, abs=5e-5)
    assert 2 * mcnemar_p_value(PairedTable(0, 16, 6, 0)) == pytest.approx(binomtest(6, 22).pvalue)


def test_paired_table_counts_each_cell() -> None:
    before = [True, True, True, False, False, False, False]
    after = [True, False, False, True, False, False, False]
    table = paired_table(before, after)
    assert table == PairedTable(both_right=1, gained=1, lost=2, both_wrong=3)
    assert (table.n, table.right_before, table.right_after) == (7, 3, 2)
    assert table.gain == pytest.approx(-1 / 7)
    with pytest.raises(ValueError):
        paired_table(before, after[:-1])


def graded(question: str, correct: bool, **changes: object) -> Graded:
    values: dict[str, object] = {
        "question": question,
        "gold": "1",
        "response": "",
        "correct": correct,
        "strict": correct,
        "flexible": correct,
        "parsed": True,
        "finished": True,
        "prompt": [3, 4],
        "tokens": [5, 6, 7],
        "too_long": False,
    }
    return Graded(**{**values, **changes})  # type: ignore[arg-type]


def test_compare_says_what_the_metrics_file_holds() -> None:
    too_long = {"parsed": False, "finished": False, "too_long": True}
    sft = [
        graded("a", True),
        graded("b", False, flexible=True, parsed=False),
        graded("c", False, finished=False, parsed=False),
        graded("d", False, **too_long),
    ]
    policy = [graded("a", True), graded("b", True), graded("c", True, finished=False), graded("d", False, **too_long)]
    metrics = compare(sft, policy, "strict", 0.95)
    assert metrics["n"] == 4
    assert (metrics["method"], metrics["confidence"]) == ("strict", 0.95)
    assert metrics["sft"] == {"accuracy": 0.25, "low": 0.045587, "high": 0.699358}
    assert metrics["policy"] == {"accuracy": 0.75, "low": 0.300642, "high": 0.954413}
    assert metrics["gain"] == 0.5
    assert metrics["gain_low"] < 0 < metrics["gain_high"]
    assert metrics["p_value"] == 0.25
    assert metrics["paired"] == {"both_right": 1, "gained": 2, "lost": 0, "both_wrong": 1}
    assert metrics["strict"] == {"sft": 0.25, "policy": 0.75}
    assert metrics["flexible"] == {"sft": 0.5, "policy": 0.75}
    # A prompt that was too long is neither a parse failure nor cut off: there is no response.
    assert metrics["parse_failures"] == {"sft": 0.5, "policy": 0.0}
    assert metrics["cut_off"] == {"sft": 0.25, "policy": 0.25}
    assert metrics["too_long"] == 1


def test_compare_rounds_to_six_decimals() -> None:
    rows = [graded("a", True), graded("b", False), graded("c", False)]
    assert compare(rows, rows, "strict", 0.95)["sft"]["accuracy"] == 0.333333


def test_compare_refuses_different_problems() -> None:
    with pytest.raises(ValueError, match="same problems"):
        compare([graded("a", True)], [graded("b", True)], "strict", 0.95)


def test_flat_names_and_accuracy_rows() -> None:
    metrics = {"test": compare([graded("a", False)], [graded("a", True)], "strict", 0.95)}
    numbers = flat(metrics)
    assert numbers["test/policy_accuracy"] == 1.0
    assert numbers["test/sft_accuracy"] == 0.0
    assert numbers["test/gain"] == 1.0
    assert numbers["test/paired_gained"] == 1
    assert numbers["test/cut_off_policy"] == 0.0
    assert "test/method" not in numbers
    assert accuracies_csv(metrics).splitlines() == [
        "split,model,accuracy,low,high",
        "test,sft,0.0,0.0,0.793451",
        "test,policy,1.0,0.206549,1.0",
    ]
