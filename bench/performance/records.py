"""Measurements as lines of a table, which says what is done and need not be measured again."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.workspaces import write_csv


class Record(NamedTuple):
    """What one contender took in one round; None where there is nothing to tell.

    Attributes:
        key: of the code, the work and the machine; a record with another one is out of date.
        first_seconds: of a rollout, what prompts and first token took.
        floor, decode_floor: the least seconds, all in all and for decoding, at the peaks of the same run.
        float32 to copy: these peaks: see `Peaks`.
        note: what else there is to say of it.
    """

    row: str
    key: str
    contender: str
    round: int
    seconds: float
    cpu_seconds: float
    peak_mb: float
    tokens: float
    float32: float
    bfloat16: float
    step_float32: float
    step_bfloat16: float
    copy: float
    first_seconds: float | None = None
    floor: float | None = None
    decode_floor: float | None = None
    note: str = ""


TEXTS, COUNTS = ("row", "key", "contender", "note"), ("round",)


class Summary(NamedTuple):
    """The medians of a contender's rounds."""

    seconds: float
    cpu_seconds: float
    peak_mb: float
    floors: float | None
    """Times its floor."""
    decode_floors: float | None
    """The same of decoding."""


def read(path: Path) -> list[Record]:
    """The records in the table; none where there is no table, or one with other columns, of a former version."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        return [_parsed(line) for line in lines] if lines.fieldnames == list(Record._fields) else []


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes the table whole."""
    write_csv(path, [Record._fields, *([_rounded(value) for value in record] for record in records)])


def finished(records: Sequence[Record], row: str, key: str, contenders: Sequence[str], rounds: int) -> bool:
    """Whether the row has all its rounds of all its contenders, as the code is."""
    done = {(record.contender, record.round) for record in records if (record.row, record.key) == (row, key)}
    return done >= {(contender, number) for contender in contenders for number in range(1, rounds + 1)}


def replaced(records: Sequence[Record], row: str, new: Sequence[Record], order: Sequence[str]) -> list[Record]:
    """The records with those of the row exchanged, in the order of the rows; what is no row any more is dropped."""
    kept = [record for record in records if record.row != row and record.row in order]
    return sorted([*kept, *new], key=lambda record: order.index(record.row))


def summaries(records: Sequence[Record], row: str) -> dict[str, Summary]:
    """The medians of each contender of the row."""
    rounds: dict[str, list[Record]] = {}
    for record in records:
        if record.row == row:
            rounds.setdefault(record.contender, []).append(record)
    return {contender: _summary(each) for contender, each in rounds.items()}


def _summary(rounds: Sequence[Record]) -> Summary:
    whole = [record.seconds / record.floor for record in rounds if record.floor]
    decoding = [(r.seconds - (r.first_seconds or 0)) / r.decode_floor for r in rounds if r.decode_floor]
    return Summary(
        seconds=median(record.seconds for record in rounds),
        cpu_seconds=median(record.cpu_seconds for record in rounds),
        peak_mb=median(record.peak_mb for record in rounds),
        floors=median(whole) if whole else None,
        decode_floors=median(decoding) if decoding else None,
    )


def _parsed(line: dict[str, str]) -> Record:
    values: dict[str, str | int | float | None] = {}
    for name, text in line.items():
        values[name] = text if name in TEXTS else int(text) if name in COUNTS else float(text) if text else None
    return Record(**values)  # type: ignore[arg-type]  # checked by the table's own writer


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value
