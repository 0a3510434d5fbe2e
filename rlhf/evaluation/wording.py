"""Shares, accuracies and gains in words: alike on the terminal, in the report, on the model card, in the registry."""

from __future__ import annotations

from collections.abc import Mapping

SMALLEST_P = 1e-6
"""The metrics keep six decimals."""


def percent(share: float) -> str:
    """0.3125 as "31.2 %"."""
    return f"{100 * share:.1f} %"


def accuracy(model: Mapping[str, float]) -> str:
    """A model of `metrics/evaluation.json` with its interval: "72.0 % [70.0, 75.0]"."""
    return f"{percent(model['accuracy'])} [{100 * model['low']:.1f}, {100 * model['high']:.1f}]"


def signed_points(share: float) -> str:
    """A difference of shares in points, with its sign: "+42.0"."""
    return f"{100 * share:+.1f}"


def gain(split: Mapping[str, float]) -> str:
    """The gain of a split of `metrics/evaluation.json` in points, with its interval: "+42.0 [+37.0, +47.0]"."""
    low, high = signed_points(split["gain_low"]), signed_points(split["gain_high"])
    return f"{signed_points(split['gain'])} [{low}, {high}]"


def p_value(p: float) -> str:
    """A p-value at two digits; one that may have been rounded to 0 is no zero: "< 1e-06"."""
    return f"{p:.2g}" if p >= SMALLEST_P else f"< {SMALLEST_P:g}"
