"""Journals are copied while a run logs, and come back beside what is there: no record is lost, and none torn."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlhf import locks
from rlhf.errors import UserError
from rlhf.tracking.journal import Journal, Writer
from tasks import journals

POINTS = [{"op": "points", "time": step, "step": step, "values": {"kl": step / 8}} for step in range(4)]
BEGIN = {"op": "run", "name": "train_ppo", "server": "here", "start": 0, "parent": "", "tags": {}}


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    place = tmp_path / "journal"
    monkeypatch.setenv("RLHF_JOURNAL_DIR", str(place))
    return place


@pytest.fixture
def copies(tmp_path) -> Path:
    return tmp_path / "copies"


def write(directory: Path, *records: dict[str, object], key: str = "a-1") -> None:
    writer = Writer(directory, key)
    for record in records:
        writer.append(record)
    writer.close()


def records(place: Path) -> list[dict[str, object]]:
    return [record for record, _ in Journal(place).records()]


def restore(copies: Path, aside: Path) -> None:
    aside.mkdir()
    with journals.at_rest(), ExitStack() as undo:
        journals.put_back(copies, aside, undo)
        undo.pop_all()


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and "lock" not in path.name)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_whole_records_and_the_artifacts_that_they_name_are_copied(directory, copies, tmp_path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report/index.html").write_text("<p>")
    writer = Writer(directory, "a-1")
    text, report = writer.add_text("a sample", "sample.txt"), writer.add_file(tmp_path / "report")
    named = [{"op": "artifact", "path": path, "folder": ""} for path in (text, report)]
    for record in (BEGIN, *named):
        writer.append(record)
    writer.add_text("is being written", "later.txt")
    (directory / "a-1/sent.json").write_text("{}")
    with (directory / "a-1/records.jsonl").open("a") as file:
        file.write('{"op": "poi')
    (directory / "killed-2").mkdir()
    journals.copy_all(copies)
    writer.close()
    assert records(copies / "a-1") == [BEGIN, *named]
    assert contents(copies).keys() == {
        "a-1/records.jsonl",
        f"a-1/files/{text}",
        f"a-1/files/{report}/index.html",
    }


def test_where_nobody_has_logged_there_is_nothing_to_copy(directory, copies):
    journals.copy_all(copies)
    assert journals.places(copies) == []
    assert not directory.exists()


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ([], [BEGIN, *POINTS[:2]]),
        ([BEGIN, *POINTS], [BEGIN, *POINTS]),
        ([BEGIN, *POINTS[2:]], [BEGIN, *POINTS[:2], BEGIN, *POINTS[2:]]),
    ],
    ids=["gone", "went on", "delivered, removed and resumed"],
)
def test_a_journal_comes_back_with_all_that_was_ever_in_it(directory, copies, tmp_path, now, expected):
    write(directory, BEGIN, *POINTS[:2])
    journals.copy_all(copies)
    (directory / "a-1/records.jsonl").unlink()
    if now:
        write(directory, *now)
        (directory / "a-1/files/tmp").mkdir(parents=True)
        (directory / "a-1/files/tmp/new.txt").write_text("new")
    restore(copies, tmp_path / "aside")
    assert records(directory / "a-1") == expected
    assert (directory / "a-1/files/tmp/new.txt").exists() == bool(now)


def test_what_is_there_stays_and_is_compared_with_the_restored_database(directory, copies, tmp_path):
    journals.copy_all(copies)
    write(directory, BEGIN, POINTS[0], key="b-2")
    (directory / "b-2/sent.json").write_text("{}")
    restore(copies, tmp_path / "aside")
    assert records(directory / "b-2") == [BEGIN, POINTS[0]]
    assert not (directory / "b-2/sent.json").exists()


def test_what_fails_later_is_undone(directory, copies, tmp_path):
    write(directory, BEGIN, POINTS[0])
    write(directory, BEGIN, POINTS[0], key="b-2")
    journals.copy_all(copies)
    write(directory, POINTS[1])
    (directory / "a-1/sent.json").write_text("{}")
    shutil.rmtree(directory / "b-2")
    before = contents(directory)
    (tmp_path / "aside").mkdir()
    with journals.at_rest(), ExitStack() as undo:
        journals.put_back(copies, tmp_path / "aside", undo)
        assert contents(directory).keys() == {f"{key}/records.jsonl" for key in ("a-1", "b-2")}
    assert contents(directory) == before


def test_a_delivery_that_goes_on_is_waited_for(directory):
    write(directory, BEGIN)
    with (
        locks.exclusive(directory / "a-1/delivery.lock", ""),
        pytest.raises(UserError, match=f"uses the journal {directory}/a-1: wait for it or stop it"),
        journals.at_rest(),
    ):
        pytest.fail("it is being delivered")
