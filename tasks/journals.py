"""Journals in a backup: what runs have logged and the tracking server may not have yet, copied and put back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlhf import anchors, locks
from rlhf.tracking.journal import DELIVERY, DIRECTORY_LOCK, FILES, RECORDS, SENT, WRITER, Journal
from tasks.databases import move_aside


def copy_all(to: Path) -> None:
    """Copies every journal into the directory `to`, up to its last whole record; runs may go on logging.

    Not copied is what a server has of a journal: a delivery then compares the two. Raises UserError for a line that is
    no record.
    """
    to.mkdir()
    for place in places(anchors.journal_dir()):
        with locks.in_turn(place.parent / DIRECTORY_LOCK):  # so that nobody removes it meanwhile
            if Journal(place).exists:
                _copy(Journal(place), to / place.name)


def _copy(journal: Journal, to: Path) -> None:
    """Copies the records, and the artifacts that they name: another one may not be whole yet, nor without secrets."""
    size, artifacts = 0, []
    for record, end in journal.records():
        size = end
        artifacts += [record["path"]] if record["op"] == "artifact" else []
    to.mkdir()
    with (journal.place / RECORDS).open("rb") as file:
        (to / RECORDS).write_bytes(file.read(size))
    for path in artifacts:
        source, copy = journal.place / FILES / path, to / FILES / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            shutil.copyfile(source, copy)


@contextmanager
def at_rest() -> Iterator[None]:
    """Holds the journals: no run begins to log meanwhile. Raises UserError where one logs, or a delivery goes on."""
    directory = anchors.journal_dir()
    with ExitStack() as held:
        held.enter_context(locks.in_turn(directory / DIRECTORY_LOCK))
        for place in places(directory):
            for lock in (WRITER, DELIVERY):
                held.enter_context(locks.exclusive(place / lock, f"uses the journal {place}: wait for it or stop it"))
        yield


def put_back(copies: Path, aside: Path, undo: ExitStack) -> None:
    """Moves the copies to where journals lie, to be called `at_rest`; `undo` takes them away again.

    Journals that are there already stay, for no server has all of them; where one has a copy, they become one. What a
    server has of them goes to the directory `aside`: its database is another one now.
    """
    directory = anchors.journal_dir()
    for copy in places(copies):
        place = directory / copy.name
        if Journal(place).exists:
            _join(copy, place)
        move_aside(place, aside, undo)
        undo.callback(shutil.rmtree, place, ignore_errors=True)
        shutil.move(copy, place)
    for place in places(directory):
        move_aside(place / SENT, aside, undo)


def _join(copy: Path, place: Path) -> None:
    """Adds to a copy what the same journal has now: more records, or others where a server had had all before."""
    before, now = (copy / RECORDS).read_bytes(), (place / RECORDS).read_bytes()
    (copy / RECORDS).write_bytes(now if now.startswith(before) else before + now)
    if (place / FILES).is_dir():
        shutil.copytree(place / FILES, copy / FILES, dirs_exist_ok=True)


def places(directory: Path) -> list[Path]:
    """The journals' directories below one that may not be there."""
    return sorted(path for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
