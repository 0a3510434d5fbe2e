"""The data gate: what prepared splits must fulfil before anything is trained on them.

Great Expectations evaluates one suite a split. The verdict holds no time and no path, so DVC can hash it; the Data
Docs are for people.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.data.answers import MARKER
from rlhf.data.gsm8k import SPLITS, Problem
from rlhf.errors import UserError

if TYPE_CHECKING:
    from great_expectations import ValidationDefinition
    from great_expectations.data_context import EphemeralDataContext
    from great_expectations.expectations import Expectation
    from pandas import DataFrame

MIN_ROWS: Mapping[str, int] = {"train": 32, "validation": 8, "gate": 8, "test": 8}
"""Fewer rows neither train nor decide anything."""
QUESTION_LENGTH = (10, 4000)
"""Characters; GSM8K's questions have 42 to 985."""
NUMBER_PATTERN = r"^-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+|/[0-9]+)?$"
FINAL_LINE_PATTERN = rf"(?:^|\n){MARKER}[^\n]*[0-9][^\n]*\s*$"
ROWS_SHOWN = 3
EXCERPT = 60


@dataclass(frozen=True)
class Failure:
    """An expectation that a split does not meet, with the first rows at fault."""

    split: str
    expectation: str
    count: int
    rows: tuple[tuple[int, str], ...]
    """Row number in the split and the beginning of its question."""
    detail: str = ""

    def __str__(self) -> str:
        shown = [f"row {number} {excerpt!r}" for number, excerpt in self.rows]
        more = [f"and {self.count - len(self.rows)} more"] if self.count > len(self.rows) > 0 else []
        where = f"{self.count} of its rows fail: {', '.join(shown + more)}" if self.rows else self.detail
        return f"{self.split}: expected that {self.expectation}: {where}"


@dataclass(frozen=True)
class Verdict:
    """What the gate found: the numbers for every expectation, and the failures."""

    numbers: Mapping[str, Any]
    """{"success", "splits": {split: {"rows", "expectations": {name: {"success", "unexpected"}}}}}"""
    failures: tuple[Failure, ...]

    def refuse_failures(self, docs: Path) -> None:
        """Raises UserError with one line for each failed expectation, and the Data Docs for the rest of the rows."""
        if self.failures:
            lines = "\n".join(f"  {failure}" for failure in self.failures)
            what_to_do = f"correct these rows ({docs / 'index.html'} shows more)"
            raise UserError(f"data: {len(self.failures)} expectations failed: {what_to_do}\n{lines}")

    def write(self, path: Path) -> None:
        """Writes the numbers as JSON."""
        path.write_text(json.dumps(self.numbers, indent=2, sort_keys=True) + "\n")


def validate(splits: Mapping[str, Sequence[Problem]], docs: Path, min_rows: Mapping[str, int] = MIN_ROWS) -> Verdict:
    """Evaluates every expectation on every split and writes the Data Docs (HTML) to `docs`."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    frames = to_frames(splits)
    source = context.data_sources.add_pandas("prepared")
    results: dict[str, Any] = {}
    for split, frame in frames.items():
        batch = source.add_dataframe_asset(split).add_batch_definition_whole_dataframe("all")
        suite = gx.ExpectationSuite(name=split, expectations=list(expectations(split, min_rows[split])))
        definition = gx.ValidationDefinition(name=split, data=batch, suite=context.suites.add(suite))
        results[split] = _run(context, context.validation_definitions.add(definition), frame)
    _write_docs(context, docs)
    return _verdict(splits, results)


def expectations(split: str, min_rows: int) -> Iterator[Expectation]:
    """The suite of one split; `notes` is the name that people read."""
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


def to_frames(splits: Mapping[str, Sequence[Problem]]) -> dict[str, DataFrame]:
    """One frame a split: the prepared columns with blank text as null, `markers` and `in_earlier_split`."""
    from pandas import DataFrame

    seen: set[str] = set()
    frames = {}
    for split in SPLITS:
        rows = splits[split]
        columns: dict[str, list[Any]] = {
            name: [_text(getattr(row, name)) for row in rows]
            for name in ("question", "answer", "gold", "demonstration")
        }
        columns["markers"] = [row.answer.count(MARKER) for row in rows]
        columns["in_earlier_split"] = [_folded(row.question) in seen for row in rows]
        frames[split] = DataFrame(columns)
        seen |= {_folded(row.question) for row in rows}
    return frames


def _text(value: str | None) -> str | None:
    return value if value and not value.isspace() else None


def _folded(question: str) -> str:
    """The question without differences of case and spacing."""
    return " ".join(question.casefold().split())


def _run(context: EphemeralDataContext, definition: ValidationDefinition, frame: DataFrame) -> Sequence[Any]:
    """The results of one split's expectations; raises UserError where one could not be evaluated."""
    import great_expectations as gx

    checkpoint = gx.Checkpoint(
        name=definition.name, validation_definitions=[definition], result_format={"result_format": "COMPLETE"}
    )
    outcome = context.checkpoints.add(checkpoint).run(batch_parameters={"dataframe": frame})
    (validation,) = outcome.run_results.values()
    for result in validation.results:
        if result.exception_info.get("raised_exception", True):
            message = result.exception_info.get("exception_message") or result.exception_info
            raise UserError(f"data: {definition.name}: {_notes(result)}: cannot be evaluated: {message}")
    return list(validation.results)


def _notes(result: Any) -> str:
    return str(result.expectation_config.notes)


def _verdict(splits: Mapping[str, Sequence[Problem]], results: Mapping[str, Sequence[Any]]) -> Verdict:
    numbers = {
        split: {
            "rows": len(splits[split]),
            "expectations": {
                _notes(result): {"success": bool(result.success), "unexpected": _unexpected(result)}
                for result in results[split]
            },
        }
        for split in results
    }
    failures = tuple(
        _failure(split, splits[split], result) for split in results for result in results[split] if not result.success
    )
    return Verdict({"success": not failures, "splits": numbers}, failures)


def _unexpected(result: Any) -> int:
    return int(result.result.get("unexpected_count", 0))


def _failure(split: str, problems: Sequence[Problem], result: Any) -> Failure:
    indices = result.result.get("unexpected_index_list") or []
    rows = tuple((int(i), _excerpt(problems[i].question)) for i in indices[:ROWS_SHOWN])
    detail = f"there are {result.result.get('observed_value')}"
    return Failure(split, _notes(result), _unexpected(result), rows, detail)


def _excerpt(question: str) -> str:
    text = " ".join(question.split())
    return text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "\u2026"


def _write_docs(context: EphemeralDataContext, docs: Path) -> None:
    # Pages that cannot be written (a full disk) it logs with a hundred lines each; the outputs' own error is told.
    logging.getLogger("great_expectations").setLevel(logging.CRITICAL)
    context.add_data_docs_site(
        "prepared",
        {
            "class_name": "SiteBuilder",
            "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.resolve())},
            "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        },
    )
    context.build_data_docs(site_names=["prepared"])
