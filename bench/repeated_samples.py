"""What several sampled answers to a question are worth: pass@k, and the majority's vote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from rlhf.data.votes import majority


class Answered(NamedTuple):
    """A question's gold number, and the number of each sampled response in canonical text; None where none was read."""

    gold: str
    answers: list[str | None]


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one of k answers is right, estimated from `samples` of which `right` are.

    1 - C(n - c, k) / C(n, k): the mean over all subsets of size k, unbiased (Chen et al., 2021, Evaluating Large
    Language Models Trained on Code, eq. 1).
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def passes(answered: Answered, k: int) -> float:
    """pass@k of one question."""
    return pass_at_k(len(answered.answers), answered.answers.count(answered.gold), k)


def majority_is_right(answered: Answered, k: int) -> float:
    """The share of right majorities among the question's groups of k consecutive answers, k a divisor of them all."""
    groups = [answered.answers[start : start + k] for start in range(0, len(answered.answers), k)]
    return fmean(majority(group) == answered.gold for group in groups)


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """Mean, and the ends of its normal interval, of what n questions each are worth."""
    from scipy.stats import norm

    mean = fmean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = float(norm.ppf((1 + confidence) / 2)) * math.sqrt(variance / len(values))
    return mean, mean - half, mean + half
