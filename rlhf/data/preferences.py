"""Preference pairs: a better answer to a question beside a worse one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from rlhf.data.gsm8k import question_hash
from rlhf.data.tables import read_table, write_table

SCHEMA = pa.schema([(name, pa.string()) for name in ("question", "chosen", "rejected", "origin")])


@dataclass(frozen=True)
class Pair:
    """Two responses to a question, of which `chosen` is the better one."""

    question: str
    chosen: str
    rejected: str
    origin: Literal["sampled", "gold", "human"]
    """Where `chosen` comes from: the policy's sample, the gold rationale that stands in, or a set of judged pairs."""


def make_pairs(
    question: str,
    samples_right: Sequence[str],
    samples_wrong: Sequence[str],
    gold: str,
    *,
    max_pairs: int,
    gold_stand_in: bool,
) -> list[Pair]:
    """At most `max_pairs` different pairs of a right and a wrong text.

    Every text comes into its turn before one is used again. Where no sample is right, the rationale `gold` is the
    chosen text if `gold_stand_in` says so; without a wrong sample there is no pair.
    """
    right, wrong = list(dict.fromkeys(samples_right)), list(dict.fromkeys(samples_wrong))
    origin: Literal["sampled", "gold"] = "sampled"
    if not right and gold_stand_in:
        right, origin = [gold], "gold"
    larger = max(len(right), len(wrong))
    smaller = min(len(right), len(wrong))
    # Row `turn` of a table with one row for each text of the smaller side; no pair comes twice.
    combinations = [
        (i, (i + turn) % len(wrong)) if len(right) >= len(wrong) else ((i + turn) % len(right), i)
        for turn in range(smaller)
        for i in range(larger)
    ]
    return [Pair(question, right[i], wrong[j], origin) for i, j in combinations[:max_pairs]]


def split_pairs(pairs: Sequence[Pair], validation_share: float) -> tuple[list[Pair], list[Pair]]:
    """Train and validation pairs, split by question: no question is on both sides.

    Validation gets `validation_share` of the questions, rounded, those with the lowest hashes; at least one question
    if the share is above 0, and train keeps at least one.
    """
    questions = sorted({pair.question for pair in pairs}, key=lambda q: (question_hash(q, "preferences"), q))
    count = round(validation_share * len(questions))
    if validation_share > 0:
        count = max(count, 1)
    held_out = set(questions[: min(count, len(questions) - 1)]) if questions else set()
    train = [pair for pair in pairs if pair.question not in held_out]
    return train, [pair for pair in pairs if pair.question in held_out]


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    """Writes pairs as Parquet; the same pairs give the same bytes."""
    write_table(path, [asdict(pair) for pair in pairs], SCHEMA)


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a Parquet file; raises UserError where it is missing or damaged."""
    return [Pair(**row) for row in read_table(path, SCHEMA)]
