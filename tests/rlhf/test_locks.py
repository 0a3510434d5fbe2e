"""The locks between processes: one holder at a time, and free once the holder is gone."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.locks import advisory, exclusive, in_turn
from tests import postgres

HOLDER = """
import sys, time
from pathlib import Path
from rlhf.locks import exclusive
with exclusive(Path(sys.argv[1]), ""):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_told_who_has_it_and_gets_it_once_that_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "made" / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=f"^process {holder.pid} is at it: wait$"),
            exclusive(path, "is at it: wait"),
        ):
            pytest.fail("two hold it")
    finally:
        holder.kill()
        holder.wait()
    with exclusive(path, "is at it"):
        assert path.read_text() == str(os.getpid())


# --- locks that are waited for

WAITING = """
import sys, time
from pathlib import Path
from rlhf import locks
kind, place, name = sys.argv[1:]
with locks.in_turn(Path(place)) if kind == "file" else locks.advisory(place, name):
    print("held", flush=True)
    time.sleep(600)
"""
SILENCE_SECONDS = 1.0
"""How long a second process has to show that nothing keeps it; one that waits shows nothing at all."""


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres.running() as uri:
        yield uri


@pytest.fixture(params=["file", "PostgreSQL"])
def lock(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The kind of a lock and its place."""
    if request.param == "file":
        return "file", str(tmp_path / "made" / "lock")
    return "PostgreSQL", request.getfixturevalue("database")


def waiting(lock: tuple[str, str], name: str) -> subprocess.Popen[bytes]:
    """A process that takes the lock as soon as it gets it, says so, and keeps it."""
    return subprocess.Popen([sys.executable, "-c", WAITING, *lock, name], stdout=subprocess.PIPE, bufsize=0)


def is_held(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], SILENCE_SECONDS)[0])


def test_the_second_gets_the_lock_once_the_first_is_killed(lock: tuple[str, str]) -> None:
    processes = [waiting(lock, "mine")]
    try:
        first = processes[0]
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        processes.append(waiting(lock, "mine"))
        second = processes[1]
        assert second.stdout is not None
        assert not is_held(second)
        first.kill()
        assert second.stdout.readline() == b"held\n"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_the_lock_is_free_after_its_block(lock: tuple[str, str]) -> None:
    kind, place = lock
    for _ in range(2):
        with in_turn(Path(place)) if kind == "file" else advisory(place, "mine"):
            pass


def test_advisory_locks_of_other_names_do_not_meet(database: str) -> None:
    with advisory(database, "mine"), advisory(database, "yours"):
        pass


@pytest.mark.parametrize(
    "uri", ["postgresql+psycopg2://me:secret@127.0.0.1:9/base", "postgresql+nothing://me:secret@host/base"]
)
def test_a_database_without_a_lock_to_give_is_one_line_without_its_password(uri: str) -> None:
    with pytest.raises(UserError, match="no lock to be had") as caught, advisory(uri, "mine"):
        pytest.fail("held")
    message = str(caught.value)
    assert uri.replace("secret", "***") in message
    assert "secret" not in message
    assert "\n" not in message


def test_a_host_that_takes_connections_and_never_answers_gives_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.postgresql.CONNECT_SECONDS", 2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/base"
        with (
            pytest.raises(UserError, match=r"timeout expired: no answer for 2 s\): start PostgreSQL"),
            advisory(uri, "mine"),
        ):
            pytest.fail("held")
