"""Intervals and tests for two models that answered the same problems.

scipy.stats takes most of a second to import, and flows need `flat` alone: the functions that use it import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.evaluation.accuracy import Graded

DECIMALS = 6


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class PairedTable:
    """How many problems each of two models got right, before and after."""

    both_right: int
    gained: int
    """Wrong before, right after."""
    lost: int
    """Right before, wrong after."""
    both_wrong: int

    @property
    def n(self) -> int:
        return self.both_right + self.gained + self.lost + self.both_wrong

    @property
    def right_before(self) -> int:
        return self.both_right + self.lost

    @property
    def right_after(self) -> int:
        return self.both_right + self.gained

    @property
    def gain(self) -> float:
        """Accuracy after minus accuracy before."""
        return (self.gained - self.lost) / self.n


def paired_table(before: Sequence[bool], after: Sequence[bool]) -> PairedTable:
    """Counts over problems in the same order; raises ValueError where the lengths differ."""
    pairs = list(zip(before, after, strict=True))
    return PairedTable(
        both_right=pairs.count((True, True)),
        gained=pairs.count((False, True)),
        lost=pairs.count((True, False)),
        both_wrong=pairs.count((False, False)),
    )


def wilson_interval(successes: float, n: float, confidence: float) -> Interval:
    """Wilson's score interval for one proportion, without continuity correction (Wilson 1927).

    `successes` and `n` need not be whole: an effective sample size is not.
    """
    from scipy.special import ndtri

    z = float(ndtri((1 + confidence) / 2))
    centre, square = successes + z**2 / 2, n + z**2
    half = z * sqrt(successes * (n - successes) / n + z**2 / 4)
    return Interval(max(0.0, (centre - half) / square), min(1.0, (centre + half) / square))


def design_effect(successes: Sequence[int], sizes: Sequence[int]) -> float:
    """How many times the variance of a share over clusters is that of as many independent trials; at least 1.

    `sizes[i]` trials of cluster i, one or more, had `successes[i]`. Successes and trials, divided by it, are those of
    an independent sample: the interval is theirs. Rao and Scott (1992), "A simple method for the analysis of clustered
    binary data", Biometrics 48, 577-585: with m clusters and the share p of all n trials, a ratio of two sums,

        var(p) = m / (m - 1) sum((successes_i - p sizes_i)^2) / n^2
        d      = var(p) / (p (1 - p) / n)

    One cluster, or a share of 0 or 1, tells nothing of the variance: a cluster's trials are then taken for all alike,
    d = sum(sizes_i^2) / n.
    """
    n, m = sum(sizes), len(sizes)
    share = sum(successes) / n
    if m == 1 or share in (0, 1):
        return sum(size**2 for size in sizes) / n
    squares = sum((found - share * size) ** 2 for found, size in zip(successes, sizes, strict=True))
    return max(1.0, m / (m - 1) * squares / (n * share * (1 - share)))


def gain_interval(table: PairedTable, confidence: float) -> Interval:
    """The interval of the paired gain: squares and adds the two Wilson intervals, less what their correlation explains.

    Method 10 of Newcombe (1998), "Improved confidence intervals for the difference between binomial proportions based
    on paired data", Statistics in Medicine 17, 2635-2650: for the gain d, the Wilson limits l1, u1 of the accuracy p1
    after and l2, u2 of p2 before, and the correlation phi,

        low  = d - sqrt((p1 - l1)^2 - 2 phi (p1 - l1)(u2 - p2) + (u2 - p2)^2)
        high = d + sqrt((u1 - p1)^2 - 2 phi (u1 - p1)(p2 - l2) + (p2 - l2)^2)
    """
    n = table.n
    after, before = table.right_after / n, table.right_before / n
    wilson_after = wilson_interval(table.right_after, n, confidence)
    wilson_before = wilson_interval(table.right_before, n, confidence)
    phi = _correlation(table)
    below = _hypotenuse(after - wilson_after.low, wilson_before.high - before, phi)
    above = _hypotenuse(wilson_after.high - after, before - wilson_before.low, phi)
    return Interval(table.gain - below, table.gain + above)


def _hypotenuse(first: float, second: float, correlation: float) -> float:
    # The square is never negative on paper, as |correlation| <= 1; rounding may say otherwise.
    return sqrt(max(0.0, first**2 - 2 * correlation * first * second + second**2))


def _correlation(table: PairedTable) -> float:
    """The phi coefficient with Newcombe's continuity correction; 0 where a margin is empty."""
    margins = table.right_after * (table.n - table.right_after) * table.right_before * (table.n - table.right_before)
    if margins == 0:
        return 0.0
    covariance = float(table.both_right * table.both_wrong - table.gained * table.lost)
    if covariance > 0:
        covariance = max(covariance - table.n / 2, 0.0)
    return covariance / sqrt(margins)


def mcnemar_p_value(table: PairedTable) -> float:
    """McNemar's exact test, one-sided: how likely so many gains among the changes are if both models were equally good.

    P(X >= gained) for X ~ Binomial(gained + lost, 1/2); 1 where nothing changed.
    """
    from scipy.stats import binomtest

    changed = table.gained + table.lost
    if changed == 0:
        return 1.0
    return float(binomtest(table.gained, changed, 0.5, alternative="greater").pvalue)


def compare(sft: Sequence[Graded], policy: Sequence[Graded], method: str, confidence: float) -> dict[str, Any]:
    """What `metrics/evaluation.json` says of one split.

    Accuracies, gains, `strict`, `flexible`, `parse_failures` and `cut_off` are shares of all n problems; `paired` and
    `too_long` are numbers of problems. Floats are rounded to six decimals.
    """
    if [row.question for row in sft] != [row.question for row in policy]:
        raise ValueError("the two models did not answer the same problems")
    table = paired_table([row.correct for row in sft], [row.correct for row in policy])
    gain = gain_interval(table, confidence)
    return {
        "n": table.n,
        "method": method,
        "confidence": confidence,
        "sft": _accuracy(table.right_before, table.n, confidence),
        "policy": _accuracy(table.right_after, table.n, confidence),
        "gain": _rounded(table.gain),
        "gain_low": _rounded(gain.low),
        "gain_high": _rounded(gain.high),
        "p_value": _rounded(mcnemar_p_value(table)),
        "paired": asdict(table),
        "too_long": sum(row.too_long for row in sft),
        **_shares({"sft": sft, "policy": policy}),
    }


def describe(policy: Sequence[Graded], method: str, confidence: float) -> dict[str, Any]:
    """What `compare` says of the policy, where it is evaluated alone."""
    return {
        "n": len(policy),
        "method": method,
        "confidence": confidence,
        "policy": _accuracy(sum(row.correct for row in policy), len(policy), confidence),
        "too_long": sum(row.too_long for row in policy),
        **_shares({"policy": policy}),
    }


def flat(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of all splits under one name each: `test/gain`, `test/policy_accuracy`, `test/cut_off_policy`."""
    numbers: dict[str, float] = {}
    for split, values in metrics.items():
        for name, value in values.items():
            if isinstance(value, Mapping):
                numbers.update({f"{split}/{name}_{key}": number for key, number in value.items()})
            elif not isinstance(value, str):
                numbers[f"{split}/{name}"] = value
    return numbers


def accuracies_csv(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """`plots/accuracy.csv`: one row a split and model, with the interval."""
    lines = ["split,model,accuracy,low,high"]
    for split, values in metrics.items():
        for model in ("sft", "policy"):
            lines.append(f"{split},{model},{values[model]['accuracy']},{values[model]['low']},{values[model]['high']}")
    return "\n".join(lines) + "\n"


def _accuracy(right: int, n: int, confidence: float) -> dict[str, float]:
    interval = wilson_interval(right, n, confidence)
    return {"accuracy": _rounded(right / n), "low": _rounded(interval.low), "high": _rounded(interval.high)}


def _shares(models: Mapping[str, Sequence[Graded]]) -> dict[str, dict[str, float]]:
    """Of each model: how many of its answers are right by each method, hold no number, were cut off."""
    flags = {"strict": "strict", "flexible": "flexible", "parse_failures": "parse_failure", "cut_off": "cut_off"}
    return {
        name: {model: _rounded(fmean(getattr(row, flag) for row in rows)) for model, rows in models.items()}
        for name, flag in flags.items()
    }


def _rounded(value: float) -> float:
    return round(value, DECIMALS)
