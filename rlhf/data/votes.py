"""The majority's vote among several sampled answers to one question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def majority(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer (Wang et al., 2022, Self-Consistency); among equals the one that was sampled first.

    A response without a number has no vote; None where nobody has one.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes, key=votes.__getitem__) if votes else None  # a Counter goes by first occurrence, max by the first
