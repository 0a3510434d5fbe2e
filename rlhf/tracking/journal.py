"""Journals: what runs log, on local disk first, one JSON record a line.

    JOURNALS/lock              held for an instant by who opens, looks for or removes a journal
    JOURNALS/KEY/
        records.jsonl          a record is in it when `append` returns, and outlives the process
        files/*/NAME           copies of the artifacts
        sent.json              what a server has of it
        writer.lock            held by the process that logs
        delivery.lock          held by the one process that sends

A journal goes when a server has all of it and its writer is done. The records, by their "op":

    run       name, server, start, parent (a key or ""), tags: first of all, and again when a run is resumed
    points    time, step, values
    params, tags               values
    dataset   name, digest, source, context
    artifact  path (below files/), folder
    original  stage, outs: DVC had the outputs already, the run that made them is to be linked
    end       time, status

Times are milliseconds since the epoch.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rlhf import faults, locks
from rlhf.errors import UserError
from rlhf.files import appearing
from rlhf.redaction import redact_files

RECORDS, FILES, SENT, WRITER, DELIVERY = "records.jsonl", "files", "sent.json", "writer.lock", "delivery.lock"
DIRECTORY_LOCK = "lock"

Record = dict[str, Any]


@dataclass(frozen=True)
class Sent:
    """What a server has of a journal."""

    server: str
    run_id: str = ""
    offset: int = 0
    """How many bytes of the records were sent."""
    unsent: tuple[tuple[str, str], ...] = ()
    """Path and folder of the artifacts among them that could not be uploaded."""


class Journal:
    """The journal of one run, in the directory `place`, whose name is the run's key."""

    def __init__(self, place: Path) -> None:
        self.place = place

    @property
    def key(self) -> str:
        """The run's name among all runs, on every server."""
        return self.place.name

    @property
    def exists(self) -> bool:
        """Whether there is anything to deliver."""
        return (self.place / RECORDS).is_file()

    def is_written(self) -> bool:
        """Whether a process has it open to log."""
        with locks.in_turn(self.place.parent / DIRECTORY_LOCK):
            return _is_written(self)

    def records(self, offset: int = 0) -> Iterator[tuple[Record, int]]:
        """The records from the byte `offset` on, each with the offset behind it; a torn last line is no record.

        Raises UserError for a line that is none.
        """
        with (self.place / RECORDS).open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    record: Record = json.loads(line)
                    record["op"]
                except (ValueError, TypeError, LookupError):
                    place = self.place / RECORDS
                    raise UserError(f"{place}: no record at byte {offset}: mend or remove that line") from None
                offset += len(line)
                yield record, offset

    def sent(self, server: str) -> Sent:
        """What `server` has; nothing where the note of it is missing or broken, for then all is compared."""
        try:
            values = json.loads((self.place / SENT).read_bytes())
            sent = Sent(**(values | {"unsent": tuple(map(tuple, values["unsent"]))}))
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, LookupError):
            return Sent(server)
        return sent if sent.server == server else Sent(server)

    def acknowledge(self, sent: Sent) -> None:
        """Notes what a server has; without it, everything is compared with what is there."""
        with appearing(self.place / SENT) as written:
            written.write_text(json.dumps(asdict(sent)))

    def is_delivered(self, server: str) -> bool:
        """Whether `server` has every record."""
        if not self.exists:
            return True
        sent = self.sent(server)
        return not sent.unsent and next(self.records(sent.offset), None) is None

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Held by the one process that delivers it; raises UserError where another one does."""
        with ExitStack() as held:
            with locks.in_turn(self.place.parent / DIRECTORY_LOCK):
                if not self.exists:
                    raise UserError(f"{self.place}: delivered meanwhile")
                held.enter_context(locks.exclusive(self.place / DELIVERY, f"is delivering {self.place}: wait for it"))
            yield

    def remove(self, server: str) -> bool:
        """Removes it, and returns True, if `server` has all of it and nobody writes to it."""
        with locks.in_turn(self.place.parent / DIRECTORY_LOCK):
            if _is_written(self) or not self.is_delivered(server):
                return False
            (self.place / RECORDS).unlink(missing_ok=True)  # what is left without them is swept up by `waiting`
            faults.reach("journal.removed")
            shutil.rmtree(self.place, ignore_errors=True)
        return True


class Writer:
    """A journal that is open for one process to log in; `append` may be called from several threads."""

    def __init__(self, directory: Path, key: str) -> None:
        """Opens or continues the journal `key`; raises UserError where another process writes it, OSError of the disk.

        A line that was torn by the end of an earlier writer is cut off.
        """
        self.journal = Journal(directory / key)
        self._guard = threading.Lock()
        with ExitStack() as opening:
            opening.enter_context(locks.in_turn(directory / DIRECTORY_LOCK))
            held = ExitStack()
            held.enter_context(locks.exclusive(self.journal.place / WRITER, f"writes {self.journal.place} already"))
            records = self.journal.place / RECORDS
            self._file = held.enter_context(records.open("ab", buffering=0))
        self._held = held
        self._logged: set[tuple[str, int]] = set()
        self._size = 0
        for record, end in self.journal.records():
            self._size = end
            if record["op"] == "points":
                self._logged |= {(name, record["step"]) for name in record["values"]}
        self._file.truncate(self._size)
        faults.reach("journal.begun")

    def append(self, record: Record) -> None:
        """Writes one record; of points, those whose name has none at that step yet: a resumed run repeats some."""
        with self._guard:
            if record["op"] == "points":
                record = self._fresh(record)
                if not record["values"]:
                    return
            self._write(f"{json.dumps(record, ensure_ascii=False)}\n".encode())
        faults.reach("journal.appended")

    def add_file(self, source: Path) -> str:
        """Copies a file or a directory into the journal, texts without secrets, for a record of op "artifact".

        Returns its path there.
        """
        files = self.journal.place / FILES
        files.mkdir(exist_ok=True)
        copy = Path(mkdtemp(dir=files)) / source.name
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            shutil.copyfile(source, copy)
        redact_files(copy)
        return str(copy.relative_to(files))

    def add_text(self, text: str, name: str) -> str:
        """Writes a file of that name into the journal."""
        files = self.journal.place / FILES
        files.mkdir(exist_ok=True)
        file = Path(mkdtemp(dir=files)) / name
        file.write_text(text, encoding="utf-8")
        return str(file.relative_to(files))

    def close(self) -> None:
        """Nothing more is to come from this process."""
        self._held.close()

    def _fresh(self, points: Record) -> Record:
        step = points["step"]
        values = {name: value for name, value in points["values"].items() if (name, step) not in self._logged}
        self._logged |= {(name, step) for name in values}
        return points | {"values": values}

    def _write(self, line: bytes) -> None:
        left = line
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(self._size)  # half a line would spoil the next one
            raise OSError(error.errno, error.strerror, str(self.journal.place)) from None
        self._size += len(line)


def waiting(directory: Path) -> list[Journal]:
    """The journals in `directory` that no process writes any more; runs without a parent first, older ones first.

    Last come those that cannot be read: whoever delivers or removes one is told, and the others do not wait for it.
    """
    if not directory.is_dir():
        return []
    found = []
    with locks.in_turn(directory / DIRECTORY_LOCK):
        for place in directory.iterdir():
            journal = Journal(place)
            if not place.is_dir() or _is_written(journal):
                continue
            if journal.exists and (rank := _rank(journal)):
                found.append((rank, journal.key, journal))
            else:  # killed before its first record, or while it was removed
                shutil.rmtree(place, ignore_errors=True)
    return [journal for *_, journal in sorted(found, key=lambda item: item[:2])]


def _rank(journal: Journal) -> tuple[int, int] | None:
    """By what it is sorted among those that wait; None where it has no record."""
    try:
        first = next(journal.records(), None)
        return first and (int(bool(first[0]["parent"])), first[0]["start"])
    except (UserError, LookupError):
        return 2, 0


def destination(journal: Journal) -> str:
    """The server for which the run was logged, last of all; raises UserError where the journal is broken."""
    try:
        return next(record["server"] for record, _ in reversed([*journal.records()]) if record["op"] == "run")
    except (StopIteration, LookupError):
        raise UserError(f"{journal.place / RECORDS}: tells of no run: mend or remove it") from None


def is_ended(journal: Journal) -> bool:
    """Whether the run's process came to tell how it ended."""
    ends: Mapping[str, bool] = {"run": False, "end": True}
    return [ends[record["op"]] for record, _ in journal.records() if record["op"] in ends][-1]


def last_moment(journal: Journal) -> int:
    """The latest time in the journal."""
    return max(int(record.get("time") or record.get("start") or 0) for record, _ in journal.records())


def _is_written(journal: Journal) -> bool:
    """Whether a process has it open; to be asked with the directory's lock held."""
    if not (journal.place / WRITER).is_file():
        return False
    try:
        with locks.exclusive(journal.place / WRITER, "writes it"):
            return False
    except UserError:
        return True
