"""Evaluating suites of expectations with Great Expectations, and what is told of them.

The verdict holds no time and no path, so DVC can hash it; the Data Docs are for people.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import UserError

if TYPE_CHECKING:
    from great_expectations import ValidationDefinition
    from great_expectations.data_context import EphemeralDataContext
    from great_expectations.expectations import Expectation
    from pandas import DataFrame

ROWS_SHOWN = 3
EXCERPT = 60


@dataclass(frozen=True)
class Suite:
    """What the rows of one table must fulfil."""

    kind: str
    """What the rows are, such as `raw`: the key in the verdict's numbers."""
    name: str
    """Which of that kind: a split."""
    frame: DataFrame
    expectations: Sequence[Expectation]
    """`notes` is the name that people read."""
    label: Callable[[int], tuple[str, str]]
    """What names a row for people, and a text that shows it."""
    advice: str = "correct these rows"

    @property
    def title(self) -> str:
        """The name of the table for people."""
        return self.name if self.kind == "splits" else f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Failure:
    """An expectation that a table does not meet, with the first rows at fault."""

    title: str
    expectation: str
    count: int
    rows: tuple[tuple[str, str], ...]
    """What names the row, and the beginning of its text."""
    advice: str
    detail: str = ""

    def __str__(self) -> str:
        shown = [f"{name} {excerpt!r}" for name, excerpt in self.rows]
        more = [f"and {self.count - len(self.rows)} more"] if self.count > len(self.rows) > 0 else []
        where = f"{self.count} of its rows fail: {', '.join(shown + more)}" if self.rows else self.detail
        return f"{self.title}: expected that {self.expectation}: {where}"


@dataclass(frozen=True)
class Verdict:
    """What the gate found: the numbers for every expectation, and the failures."""

    numbers: Mapping[str, Any]
    """{"success", kind: {name: {"rows", "expectations": {notes: {"success", "unexpected"}}}}}"""
    failures: tuple[Failure, ...]

    def refuse_failures(self, docs: Path) -> None:
        """Raises UserError with one line for each failed expectation, and the Data Docs for the rest of the rows."""
        if self.failures:
            lines = "\n".join(f"  {failure}" for failure in self.failures)
            advice = " or ".join(dict.fromkeys(failure.advice for failure in self.failures))
            what_to_do = f"{advice} ({docs / 'index.html'} shows more)"
            raise UserError(f"data: {len(self.failures)} expectations failed: {what_to_do}\n{lines}")

    def write(self, path: Path, kinds: Sequence[str]) -> None:
        """Writes the numbers of these kinds as JSON."""
        kept = {kind: self.numbers[kind] for kind in ("success", *kinds)}
        path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")

    def summary(self) -> str:
        """The numbers and the failures as Markdown, for people."""
        tables = [
            (kind, name, found)
            for kind, named in self.numbers.items()
            if kind != "success"
            for name, found in named.items()
        ]
        rows = [
            f"| {kind} | {name} | {found['rows']} | {_met(found['expectations'])} |" for kind, name, found in tables
        ]
        exceptions = [
            f"- {kind} {name}, {found['expectations'][notes]['unexpected']} rows do not: {notes}"
            for kind, name, found in tables
            for notes in found["expectations"]
            if found["expectations"][notes]["success"] and found["expectations"][notes]["unexpected"]
        ]
        parts = [
            "# Data: " + (f"{len(self.failures)} expectations failed" if self.failures else "all expectations met"),
            "\n".join(["| kind | table | rows | expectations met |", "| --- | --- | --- | --- |", *rows]),
            "\n".join(f"- {failure}" for failure in self.failures),
            "\n".join(["Within their thresholds:", "", *exceptions]) if exceptions else "",
        ]
        return "\n\n".join(part for part in parts if part) + "\n"


def _met(expectations: Mapping[str, Mapping[str, Any]]) -> str:
    return f"{sum(found['success'] for found in expectations.values())} of {len(expectations)}"


def evaluate(suites: Sequence[Suite], docs: Path) -> Verdict:
    """Evaluates every suite and writes the Data Docs (HTML) to `docs`.

    Where raw rows are at fault, what follows from them is not told.
    """
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    source = context.data_sources.add_pandas("data")
    numbers: dict[str, Any] = {}
    failures: list[Failure] = []
    for suite in suites:
        batch = source.add_dataframe_asset(suite.title).add_batch_definition_whole_dataframe("all")
        made = context.suites.add(gx.ExpectationSuite(name=suite.title, expectations=list(suite.expectations)))
        definition = gx.ValidationDefinition(name=suite.title, data=batch, suite=made)
        results = _run(context, context.validation_definitions.add(definition), suite.frame)
        numbers.setdefault(suite.kind, {})[suite.name] = {
            "rows": len(suite.frame),
            "expectations": {
                _notes(result): {"success": bool(result.success), "unexpected": _unexpected(result)}
                for result in results
            },
        }
        failures += [_failure(suite, result) for result in results if not result.success]
    _write_docs(context, docs)
    raw = [failure for failure in failures if failure.title.startswith("raw ")]
    return Verdict({"success": not failures, **numbers}, tuple(raw or failures))


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


def _unexpected(result: Any) -> int:
    return int(result.result.get("unexpected_count", 0))


def _failure(suite: Suite, result: Any) -> Failure:
    indices = result.result.get("unexpected_index_list") or []
    rows = tuple((name, _excerpt(text)) for name, text in (suite.label(int(i)) for i in indices[:ROWS_SHOWN]))
    detail = f"there are {result.result.get('observed_value')}"
    return Failure(suite.title, _notes(result), _unexpected(result), rows, suite.advice, detail)


def _excerpt(text: str) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= EXCERPT else shown[: EXCERPT - 1] + "\u2026"


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
