"""Numbers in words, by hand."""

from __future__ import annotations

from rlhf.evaluation.wording import accuracy, gain, p_value, percent, signed_points


def test_shares_are_percentages_with_one_decimal():
    assert percent(0.3125) == "31.2 %"
    assert accuracy({"accuracy": 0.72, "low": 0.7, "high": 0.754}) == "72.0 % [70.0, 75.4]"


def test_differences_carry_their_sign():
    assert (signed_points(0.42), signed_points(-0.051), signed_points(0)) == ("+42.0", "-5.1", "+0.0")
    assert gain({"gain": -0.02, "gain_low": -0.051, "gain_high": 0.0113}) == "-2.0 [-5.1, +1.1]"


def test_a_p_value_that_was_rounded_away_is_no_zero():
    assert [p_value(p) for p in (0.0, 9e-7, 1e-6, 0.0314, 1.0)] == ["< 1e-06", "< 1e-06", "1e-06", "0.031", "1"]
