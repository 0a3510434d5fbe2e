"""GSM8K problems: their form, cutting train into splits, the prepared Parquet files.

Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021. An answer is a rationale, one step a
line, whose last line is `#### number`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import pyarrow as pa

from rlhf.data.answers import MARKER, canonical, extract_answer
from rlhf.data.tables import read_table, write_table
from rlhf.params import Data

SPLITS = ("train", "validation", "gate", "test")


@dataclass(frozen=True)
class Problem:
    """A row of the prepared data. Text that the source lacks is empty here, and the data gate refuses it."""

    question: str
    answer: str
    """Rationale that ends in `#### gold`."""
    gold: str | None
    """The final number's canonical text; None where the answer holds none."""
    demonstration: str
    """What supervised fine-tuning imitates."""
    steps: int
    """Lines of the rationale before the final one."""
    source: str


Splits = dict[str, list[Problem]]

SCHEMA = pa.schema(
    [
        ("question", pa.string()),
        ("answer", pa.string()),
        ("gold", pa.string()),
        ("demonstration", pa.string()),
        ("steps", pa.int64()),
        ("source", pa.string()),
    ]
)


def make_problem(question: str, answer: str, source: str, demonstration: str | None = None) -> Problem:
    """The prepared row of a question and its answer; the answer is the demonstration unless another is given."""
    number = extract_answer(answer)
    return Problem(
        question=question,
        answer=answer,
        gold=None if number is None else canonical(number),
        demonstration=answer if demonstration is None else demonstration,
        steps=sum(1 for line in answer.partition(MARKER)[0].splitlines() if line.strip()),
        source=source,
    )


# Splits


def question_hash(question: str, purpose: str = "") -> float:
    """A number in [0, 1) that depends on the question and the purpose alone; purposes are independent."""
    digest = sha256(f"{purpose}\n{question}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def cut(train: Sequence[Problem], test: Sequence[Problem], data: Data) -> Splits:
    """Cuts validation and gate from train by the question's hash and applies the caps; order is kept.

    A row stays in its split whatever rows come or go around it, and a cap keeps the lowest hashes.
    """
    splits: Splits = {"train": [], "validation": [], "gate": [], "test": list(test)}
    for problem in train:
        splits[split_of(problem.question, data)].append(problem)
    return {split: _capped(problems, getattr(data, f"max_{split}")) for split, problems in splits.items()}


def split_of(question: str, data: Data) -> str:
    """The split of a question among those that the source gives for training: train, validation or gate."""
    position = question_hash(question)
    if position < data.validation_share:
        return "validation"
    return "gate" if position < data.validation_share + data.gate_share else "train"


def _capped(problems: list[Problem], limit: int | None) -> list[Problem]:
    if limit is None or len(problems) <= limit:
        return problems
    kept = sorted(range(len(problems)), key=lambda i: (question_hash(problems[i].question), i))[:limit]
    return [problems[i] for i in sorted(kept)]


# Files


def write_prepared(path: Path, problems: Iterable[Problem]) -> None:
    """Writes one split as Parquet; the same problems give the same bytes."""
    write_table(path, [asdict(problem) for problem in problems], SCHEMA)


def read_prepared(path: Path) -> list[Problem]:
    """The problems of one prepared split; raises UserError where the file is missing or damaged."""
    return [Problem(**row) for row in read_table(path, SCHEMA)]
