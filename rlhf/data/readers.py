"""Files of rows: JSONL, JSON, CSV and Parquet, one row at a time, each with its place for messages.

CSV and JSON are read as UTF-8. Nothing is guessed: what is no row is refused with its place.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from rlhf.errors import UserError, first_line

Placed = tuple[str, Mapping[str, Any]]
"""Where a row stands, such as `train.csv row 3`, and its values by column."""


def read_rows(path: Path) -> Iterator[Placed]:
    """The rows of a file, lazily; raises UserError that names the file, and the row where one is at fault."""
    read = FORMATS.get(path.suffix.lower())
    if read is None:
        raise UserError(f"{path}: the ending names no format: take one of {', '.join(FORMATS)}")
    count = 0
    try:
        for count, row in enumerate(read(path), start=1):  # noqa: B007
            yield row
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or first_line(error)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: not UTF-8 after row {count}: {first_line(error)}") from None
    if not count:
        raise UserError(f"{path} holds no rows: give at least one")


def find_file(directory: Path, stem: str, key: str) -> Path:
    """The one file in `directory` called `stem` with the ending of a known format; `key` is the param that names it."""
    found = [path for ending in FORMATS if (path := directory / f"{stem}{ending}").is_file()]
    if not found:
        endings = ", ".join(FORMATS)
        raise UserError(f"{directory / stem}.jsonl is missing: write it (or {endings}), or name the file with {key}")
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise UserError(f"{directory} holds {names}: name one of them with {key}")
    return found[0]


def value_of(row: Placed, column: str, key: str) -> Any:
    """What a row has in a column, which the param `key` names; raises UserError where there is no such column."""
    place, values = row
    if column not in values:
        raise UserError(f"{place}: has no column {column}: it has {', '.join(map(str, values))}: name one with {key}")
    return values[column]


def text_of(row: Placed, column: str, key: str, numbers: bool = False) -> str:
    """The text in a column, empty for null; with `numbers` a number, or a list of one, is text as well."""
    value = value_of(row, column, key)
    if numbers and isinstance(value, list) and len(value) == 1:
        value = value[0]
    if numbers and isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return str(value)
    if value is None:
        return ""
    if not isinstance(value, str):
        wanted = "text or one number" if numbers else "text"
        raise UserError(f"{row[0]}: column {column} is {type(value).__name__}: write it as {wanted}, or name another")
    return value


def _json(path: Path) -> Iterator[Placed]:
    """One object a line, or one list of objects."""
    if _begins_a_list(path):
        for number, row in enumerate(_parsed(path.read_bytes(), str(path)), start=1):
            place = f"{path} row {number}"
            yield place, _object(row, place)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{path} line {number}"
                yield place, _object(_parsed(line, place), place)


def _begins_a_list(path: Path) -> bool:
    with path.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    return first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _parsed(text: bytes, place: str) -> Any:
    try:
        return json.loads(text.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        advice = "write one JSON object a line, or one list of objects"
        raise UserError(f"{place}: not valid JSON ({first_line(error)}): {advice}") from None


def _object(row: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{place}: not a JSON object: write one with a key for each column")
    return row


def _csv(path: Path) -> Iterator[Placed]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            names = next(reader, [])
            for number, values in enumerate((row for row in reader if row), start=1):
                place = f"{path} row {number}"
                if len(values) != len(names):
                    raise UserError(f"{place}: has {len(values)} fields, the first line names {len(names)}: quote text")
                yield place, dict(zip(names, values, strict=True))
        except csv.Error as error:
            raise UserError(f"{path} line {reader.line_num}: not valid CSV ({error}): quote text with commas") from None


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{path} row {number}", row
    except pa.ArrowException as error:
        raise UserError(f"{path} cannot be read as Parquet: {first_line(error)}: write it again") from None


FORMATS: Mapping[str, Callable[[Path], Iterator[Placed]]] = {
    ".jsonl": _json,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
