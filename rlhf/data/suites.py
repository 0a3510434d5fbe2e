"""What data must fulfil before anything is trained on it: one suite for each kind of table.

`raw` rows as the source has them, the prepared `splits`, and `drift` against the data accepted last. What is asked of
tokens is in `token_suites`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rlhf.data.answers import MARKER
from rlhf.data.expectations import Suite
from rlhf.data.gsm8k import SPLITS, Problem
from rlhf.data.overlap import N, all_grams, folded, shared
from rlhf.data.sources import BOXED, HALVES, Row, Rows, answer_number, final_number
from rlhf.params import Columns

if TYPE_CHECKING:
    from great_expectations.expectations import Expectation
    from pandas import DataFrame

MIN_ROWS: Mapping[str, int] = {"train": 32, "validation": 8, "gate": 8, "test": 8}
"""Fewer rows neither train nor decide anything."""
QUESTION_LENGTH = (10, 4000)
"""Characters; GSM8K's questions have 42 to 985."""
NUMBER_PATTERN = r"^-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+|/[0-9]+)?$"
FINAL_LINE_PATTERN = rf"(?:^|\n){MARKER}[^\n]*[0-9][^\n]*\s*$"
OVERLAP = 0.8
"""A question that shares this part of its 8-grams with train is train's with other words at one end."""

MEASURES = ("rows", "question length", "answer magnitude")
"""Rows of a split, mean length of a question in characters, geometric mean of 1 + |gold|."""
Profile = dict[str, dict[str, float]]
"""The measures of each split."""


# Raw rows


def raw(rows: Rows, columns: Columns) -> Iterator[Suite]:
    """Rows as the source has them; a failure names file and row."""
    import great_expectations.expectations.core as gxe

    answer = f"column {columns.gold} holds one number" if columns.gold else f"column {columns.answer} gives one number"
    for half in HALVES:
        checks: list[Expectation] = [
            gxe.ExpectColumnValuesToNotBeNull(
                column="question", notes=f"column {' and '.join(columns.question)} is not empty"
            ),
            gxe.ExpectColumnValuesToNotBeNull(column="number", notes=answer),
        ]
        if columns.gold:
            notes = f"columns {columns.gold} and {columns.answer} give the same number"
            checks.append(gxe.ExpectColumnValuesToBeInSet(column="agrees", value_set=[True], notes=notes))
        table = frame(
            question=[text(row.question) for row in rows[half]],
            number=[None if (number := final_number(row)) is None else str(number) for row in rows[half]],
            agrees=[_agrees(row) for row in rows[half]],
        )
        labels = [(row.place, row.question) for row in rows[half]]
        yield Suite("raw", half, table, checks, labels.__getitem__)


def _agrees(row: Row) -> bool:
    """Whether the gold column's number is the one that the answer marks, if both do."""
    marked = answer_number(row.answer) if MARKER in row.answer or BOXED in row.answer else None
    number = final_number(row)
    return marked is None or number is None or marked == number


# Prepared splits


def prepared(
    splits: Mapping[str, Sequence[Problem]], max_overlap: float, min_rows: Mapping[str, int] = MIN_ROWS
) -> Iterator[Suite]:
    """The four splits; `max_overlap` is the share of a held-out split's questions that may overlap with train."""
    seen: set[str] = set()
    grams = all_grams(problem.question for problem in splits["train"])
    for split in SPLITS:
        rows = splits[split]
        columns: dict[str, list[Any]] = {
            name: [text(getattr(row, name)) for row in rows] for name in ("question", "answer", "gold", "demonstration")
        }
        columns["markers"] = [row.answer.count(MARKER) for row in rows]
        columns["in_earlier_split"] = [folded(row.question) in seen for row in rows]
        columns["overlap"] = [0.0 if split == "train" else shared(row.question, grams) for row in rows]
        checks = list(_of_split(split, min_rows[split], max_overlap))
        yield Suite("splits", split, frame(**columns), checks, numbered([row.question for row in rows]))
        seen |= {folded(row.question) for row in rows}


def _of_split(split: str, min_rows: int, max_overlap: float) -> Iterator[Expectation]:
    import great_expectations.expectations.core as gxe

    low, high = QUESTION_LENGTH
    yield gxe.ExpectTableRowCountToBeBetween(min_value=min_rows, notes=f"there are at least {min_rows} rows")
    for column in ("question", "answer", "gold", "demonstration"):
        notes = "the answer ends in a readable number" if column == "gold" else f"{column} is not empty"
        yield gxe.ExpectColumnValuesToNotBeNull(column=column, notes=notes)
    yield gxe.ExpectColumnValueLengthsToBeBetween(
        column="question", min_value=low, max_value=high, notes=f"the question has {low} to {high} characters"
    )
    yield gxe.ExpectColumnValuesToBeUnique(column="question", notes="no question comes twice")
    yield gxe.ExpectColumnValuesToMatchRegex(column="gold", regex=NUMBER_PATTERN, notes="gold is a number")
    yield gxe.ExpectColumnValuesToBeInSet(
        column="markers", value_set=[1], notes=f"the answer holds exactly one {MARKER}"
    )
    yield gxe.ExpectColumnValuesToMatchRegex(
        column="demonstration", regex=FINAL_LINE_PATTERN, notes=f"the demonstration ends in a {MARKER} line"
    )
    if split != SPLITS[0]:
        earlier = ", ".join(SPLITS[: SPLITS.index(split)])
        yield gxe.ExpectColumnValuesToBeInSet(
            column="in_earlier_split", value_set=[False], notes=f"the question is not in {earlier}"
        )
        yield gxe.ExpectColumnValuesToBeBetween(
            column="overlap",
            max_value=OVERLAP,
            strict_max=True,
            mostly=1 - max_overlap,
            notes=f"at most {max_overlap:.1%} of the questions share {OVERLAP:.0%} of their {N}-grams with train "
            "(data.max_overlap)",
        )


# Drift


def profile(splits: Mapping[str, Sequence[Problem]]) -> Profile:
    """The measures of each split that drift is told by."""
    return {split: _measures(problems) for split, problems in splits.items()}


def _measures(problems: Sequence[Problem]) -> dict[str, float]:
    sizes = [_log_size(problem.gold) for problem in problems if problem.gold is not None]
    count = max(len(problems), 1)
    length = sum(len(problem.question) for problem in problems) / count
    return dict(zip(MEASURES, (len(problems), length, math.exp(sum(sizes) / max(len(sizes), 1))), strict=True))


def _log_size(gold: str) -> float:
    return math.log1p(abs(float(Fraction(gold))))


def drift(now: Profile, accepted: Profile, max_drift: float) -> Iterator[Suite]:
    """How far each measure is from that of the data accepted last: 0.5 is half again as much, or two thirds."""
    import great_expectations.expectations.core as gxe

    for split in SPLITS:
        before = accepted[split]
        change = [_factor(now[split][name], value) - 1 for name, value in before.items()]
        labels = [(name, f"{value:.4g} before, {now[split][name]:.4g} now") for name, value in before.items()]
        check = gxe.ExpectColumnValuesToBeBetween(
            column="change",
            max_value=max_drift,
            notes=f"every measure is within {max_drift:.0%} of the data accepted last (data.max_drift)",
        )
        advice = "correct the source, or accept the change with a larger data.max_drift"
        yield Suite("drift", split, frame(change=change), [check], labels.__getitem__, advice)


def _factor(now: float, before: float) -> float:
    return max(now, before) / max(min(now, before), 1e-9)


# Tables


def frame(**columns: Sequence[Any]) -> DataFrame:
    """A table of these columns."""
    from pandas import DataFrame

    return DataFrame(columns)


def text(value: str | None) -> str | None:
    """The text, or null where nothing can be seen of it."""
    return value if value and not value.isspace() else None


def numbered(texts: Sequence[str]) -> Callable[[int], tuple[str, str]]:
    """Names each row by its number, counted from 0."""
    return lambda row: (f"row {row}", texts[row])
