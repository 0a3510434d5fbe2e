"""The table of measurements: what is kept, and what is taken for finished."""

from __future__ import annotations

from pathlib import Path

from bench.performance import records
from bench.performance.records import Record, finished, replaced, summaries


def made(row: str, contender: str, number: int, seconds: float = 1.0, key: str = "k", **more: float) -> Record:
    return Record(row, key, contender, number, seconds, 2 * seconds, 100 * seconds, 64, 1e9, 2e9, 5e8, 4e9, 3e9, **more)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "results" / "performance.csv"
    assert records.read(path) == []
    known = [made("a", "ours, fast", 1, 0.5, floor=0.25)._replace(note="Of 2 answers, 2."), made("a", "theirs", 1)]
    records.write(path, known)
    assert records.read(path) == known
    path.write_text(path.read_text().replace("peak_mb", "peak", 1))
    assert records.read(path) == []


def test_a_row_is_finished_with_all_rounds_of_all_contenders() -> None:
    known = [made("a", "ours", 1), made("a", "ours", 2), made("a", "theirs", 1)]
    assert finished(known, "a", "k", ["ours"], 2)
    assert not finished(known, "a", "k", ["ours", "theirs"], 2)
    assert finished(known, "a", "k", ["ours", "theirs"], 1)
    assert not finished(known, "a", "other code", ["ours"], 1)
    assert not finished(known, "b", "k", ["ours"], 1)


def test_a_row_is_exchanged_in_its_place() -> None:
    known = [made("a", "ours", 1), made("b", "ours", 1), made("gone", "ours", 1)]
    new = [made("a", "ours", 1, 5.0), made("a", "ours", 2, 6.0)]
    assert replaced(known, "a", new, ["a", "b"]) == [*new, known[1]]


def test_a_summary_has_medians_and_ratios_to_the_floors() -> None:
    seconds = (8.0, 4.0, 6.0)
    known = [
        made("a", "ours", number, one, first_seconds=1.0, floor=2.0, decode_floor=1.0)
        for number, one in enumerate(seconds, start=1)
    ]
    summary = summaries([*known, made("b", "ours", 1, 99.0)], "a")["ours"]
    assert (summary.seconds, summary.cpu_seconds, summary.peak_mb) == (6.0, 12.0, 600.0)
    assert (summary.floors, summary.decode_floors) == (3.0, 5.0)
    assert summaries([made("a", "theirs", 1)], "a")["theirs"].floors is None
