"""Whether our verifier and the harness say the same of the same answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.data.answers import is_correct


def told(
    contender: str, theirs: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]], golds: Sequence[str]
) -> str:
    """One sentence on the peer's answers, each with its verdict, to the first problems of those gold answers.

    `ours` are our model's answers to the same problems.
    """
    pairs = list(zip(theirs, golds, strict=False))
    verdicts = sum(is_correct(answer["response"], gold, "strict") == answer["correct"] for answer, gold in pairs)
    same = sum(mine["response"].strip() == other["response"].strip() for mine, other in zip(ours, theirs, strict=True))
    return (
        f"Of {len(pairs)} answers of {contender}, {same} are ours word for word, and our verifier says the same of "
        f"{verdicts}."
    )
