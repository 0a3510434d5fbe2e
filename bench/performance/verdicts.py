"""Whether our verifier and the harness say the same of the same answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.data.answers import is_correct


def told(contender: str, answers: Sequence[Mapping[str, Any]], golds: Sequence[str]) -> str:
    """One sentence on the peer's answers, each with its verdict, to the first problems of those gold answers."""
    pairs = list(zip(answers, golds, strict=False))
    same = sum(is_correct(answer["response"], gold, "strict") == answer["correct"] for answer, gold in pairs)
    return f"Of {len(pairs)} answers of {contender}, our verifier says the same of {same}."
