"""How a reward model orders held-out pairs: accuracy, likelihood, calibration, margins, length bias.

A pair's margin is score(chosen) - score(rejected), in raw scores; sigmoid(margin) is the model's probability that the
chosen answer is the better one (Bradley, Terry, 1952).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, pi
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf.evaluation.statistics import DECIMALS, design_effect, wilson_interval

BINS = 10
"""Bins of equal width over confidences from 0.5 to 1."""
QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
CONSTANT_LOG_LOSS = log(2)
"""Nats a pair of a model that calls every pair even."""

Floats = NDArray[np.float64]


class ScoredAnswer(NamedTuple):
    """A response as tokens, end-of-sequence included, with its raw score."""

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class ScoredPair:
    """Two answers to a question, of which `chosen` is the better one."""

    question: str
    chosen: ScoredAnswer
    rejected: ScoredAnswer

    @property
    def margin(self) -> float:
        return self.chosen.score - self.rejected.score

    @property
    def extra_tokens(self) -> int:
        """By how many tokens the chosen answer is longer than the rejected one."""
        return len(self.chosen.tokens) - len(self.rejected.tokens)


class CalibrationBin(NamedTuple):
    """The pairs whose confidence lies in [`above`, `below`), in the last bin up to 1 itself.

    `confidence` is its mean over the pairs, `accuracy` their share in the right order; None where there is no pair.
    """

    above: float
    below: float
    pairs: int
    confidence: float | None
    accuracy: float | None
    low: float | None
    high: float | None


def measure(pairs: Sequence[ScoredPair], confidence: float) -> dict[str, Any]:
    """What `metrics/reward_model.json` says; of no pairs, their number alone.

    A pair counts as right where the chosen answer scores strictly higher. Pairs of one question share answers, so the
    interval is that of `pairs / design_effect` independent ones. `log_loss` is in nats a pair. Every float is rounded
    to six decimals; what cannot be told (a share of no pairs, a correlation with a constant) is None.
    """
    if not pairs:
        return {"pairs": 0, "questions": 0}
    margins = pair_margins(pairs)
    sizes = Counter(pair.question for pair in pairs)
    right = Counter(pair.question for pair in pairs if pair.margin > 0)
    effect = design_effect([right[question] for question in sizes], list(sizes.values()))
    interval = wilson_interval(right.total() / effect, len(pairs) / effect, confidence)
    table = calibration(margins, confidence)
    found = {
        "pairs": len(pairs),
        "questions": len(sizes),
        "pair_accuracy": right.total() / len(pairs),
        "pair_accuracy_low": interval.low,
        "pair_accuracy_high": interval.high,
        "design_effect": effect,
        "log_loss": float(np.logaddexp(0, -margins).mean()),
        "log_loss_constant": CONSTANT_LOG_LOSS,
        "calibration_error": calibration_error(table),
        "calibration_error_by_chance": calibration_error_by_chance(margins),
        "margin": {
            "mean": float(margins.mean()),
            "deviation": float(margins.std()),
            **{name: float(np.quantile(margins, share)) for name, share in QUANTILES.items()},
        },
        "length": length_bias(pairs),
    }
    return _rounded(found)


def pair_margins(pairs: Sequence[ScoredPair]) -> Floats:
    """The margin of each pair."""
    return np.array([pair.margin for pair in pairs], dtype=np.float64)


def calibration(margins: Floats, confidence: float) -> list[CalibrationBin]:
    """The reliability table over `BINS` bins of the model's confidence max(p, 1 - p), p = sigmoid(margin).

    Which of the two answers stands first says nothing, so a pair is one prediction: that the answer which scores higher
    is the better one. Counting each pair both ways round would only add the mirror image below 0.5, with the same gaps.
    A pair of equal scores is right by half, as it is on average over both ways. `confidence` is the level of the
    intervals, which take pairs as independent.
    """
    sure, right = _confidence(margins), _right(margins)
    edges, place = np.linspace(0.5, 1, BINS + 1), _bins(sure)
    table = []
    for number in range(BINS):
        inside = place == number
        count = int(inside.sum())
        row = CalibrationBin(float(edges[number]), float(edges[number + 1]), count, None, None, None, None)
        if count:
            interval = wilson_interval(round(float(right[inside].sum())), count, confidence)
            row = row._replace(
                confidence=float(sure[inside].mean()),
                accuracy=float(right[inside].mean()),
                low=interval.low,
                high=interval.high,
            )
        table.append(row)
    return table


def calibration_error(table: Sequence[CalibrationBin]) -> float:
    """Expected calibration error: the mean gap between confidence and accuracy of the bins, weighted by their pairs
    (Guo et al., 2017, eq. 3)."""
    total = sum(row.pairs for row in table)
    gaps = [
        row.pairs * abs(row.accuracy - row.confidence)
        for row in table
        if row.accuracy is not None and row.confidence is not None
    ]
    return sum(gaps) / total


def calibration_error_by_chance(margins: Floats) -> float:
    """The calibration error to expect of so many pairs if the model were calibrated perfectly and pairs independent.

    A bin's gap is then the mean of n deviations of variance c(1 - c) each, about normal, and E|normal| is its deviation
    times sqrt(2 / pi). An error of this size says nothing against the model.
    """
    sure, place = _confidence(margins), _bins(_confidence(margins))
    variances = np.array([(sure * (1 - sure))[place == number].sum() for number in range(BINS)])
    return float(np.sqrt(2 / pi * variances).sum() / len(margins))


def length_bias(pairs: Sequence[ScoredPair]) -> dict[str, Any]:
    """What the score has to do with the number of tokens.

    `all`, `right` and `wrong` correlate score and length over different answers. Scores compare only within a question,
    so these mix length with what the question is; `margin` correlates, over pairs, the margin with the chosen answer's
    extra tokens, where the question cancels out. Of the pairs of unequal length, `longer_scored_higher` beside
    `longer_is_better` tells whether the model leans to the longer answer more than the truth does.
    """
    right = {(pair.question, pair.chosen.tokens): pair.chosen for pair in pairs}
    wrong = {(pair.question, pair.rejected.tokens): pair.rejected for pair in pairs}
    margins, extra = pair_margins(pairs), np.array([pair.extra_tokens for pair in pairs])
    unequal = extra != 0
    return {
        "all": _by_length([*right.values(), *wrong.values()]),
        "right": _by_length(list(right.values())),
        "wrong": _by_length(list(wrong.values())),
        "margin": _correlations(margins, extra),
        "longer_scored_higher": _share((margins * extra > 0)[unequal]),
        "longer_is_better": _share((extra > 0)[unequal]),
        "longer_better": _ordered(margins[extra > 0]),
        "shorter_better": _ordered(margins[extra < 0]),
        "equal_length": _ordered(margins[extra == 0]),
    }


def calibration_csv(table: Sequence[CalibrationBin]) -> str:
    """`plots/reward_calibration.csv`: the bins that hold pairs."""
    lines = [",".join(CalibrationBin._fields)]
    lines += [",".join(str(value) for value in _rounded(row._asdict()).values()) for row in table if row.pairs]
    return "\n".join(lines) + "\n"


def flat(values: Mapping[str, Any], prefix: str = "held_out") -> dict[str, float]:
    """The numbers that could be told under one name each, as `held_out/margin/mean`."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers |= flat(value, f"{prefix}/{name}")
        elif value is not None:
            numbers[f"{prefix}/{name}"] = value
    return numbers


def _confidence(margins: Floats) -> Floats:
    """sigmoid(|margin|): the probability of what the model holds for the better answer."""
    return np.exp(-np.logaddexp(0, -np.abs(margins)))


def _right(margins: Floats) -> Floats:
    return (np.sign(margins) + 1) / 2


def _bins(sure: Floats) -> NDArray[np.int64]:
    return np.minimum(((sure - 0.5) * 2 * BINS).astype(np.int64), BINS - 1)


def _by_length(answers: Sequence[ScoredAnswer]) -> dict[str, Any]:
    scores, lengths = np.array([a.score for a in answers]), np.array([len(a.tokens) for a in answers])
    return {"answers": len(answers), "mean_tokens": float(lengths.mean()), **_correlations(scores, lengths)}


def _correlations(first: NDArray[Any], second: NDArray[Any]) -> dict[str, float | None]:
    from scipy.stats import rankdata

    ranks = rankdata(first), rankdata(second)
    return {"pearson": _correlation(first, second), "spearman": _correlation(*ranks)}


def _correlation(first: NDArray[Any], second: NDArray[Any]) -> float | None:
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ordered(margins: Floats) -> dict[str, Any]:
    return {"pairs": len(margins), "accuracy": _share(margins > 0)}


def _share(flags: NDArray[np.bool_]) -> float | None:
    return float(flags.mean()) if len(flags) else None


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Floats at six decimals, in sections too."""
    return {
        name: _rounded(value)
        if isinstance(value, Mapping)
        else round(value, DECIMALS)
        if isinstance(value, float)
        else value
        for name, value in values.items()
    }
