"""Locks between processes, which the kernel, or the database, frees however their holder ends."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO

from rlhf import anchors, postgresql
from rlhf.errors import UserError
from rlhf.redaction import redact

POLL_SECONDS = 0.2


@contextmanager
def exclusive(path: Path, busy: str) -> Iterator[None]:
    """Holds the lock file `path`, which then says this process's id; it and its directory are made if need be.

    Raises UserError "process N `busy`" where another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"process {file.read().strip()} {busy}") from None
        _sign(file)
        yield


@contextmanager
def in_turn(path: Path, doing: str = "") -> Iterator[None]:
    """Holds the lock file `path`, as `exclusive` does, as soon as nobody else does.

    `doing` is what its holder may be doing ("registers a policy"): with it, standard error says for whom this waits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            _say_who(f"process {file.read().strip()}", doing)
            fcntl.flock(file, fcntl.LOCK_EX)
        _sign(file)
        yield


def _sign(file: IO[str]) -> None:
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()


def _say_who(holder: str, doing: str) -> None:
    if doing:
        print(redact(f"waiting for {holder}, which {doing}"), file=sys.stderr, flush=True)


@contextmanager
def advisory(uri: str, name: str, doing: str = "") -> Iterator[None]:
    """Holds PostgreSQL's advisory lock `name` in the database at `uri`, as soon as nobody else does, on any host.

    It belongs to a connection of its own, outside any transaction: however this process ends, the database frees it.
    `doing` is as in `in_turn`. Raises UserError where the database cannot be reached, or falls silent.
    """
    from sqlalchemy import Connection, make_url, text
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    key = int.from_bytes(sha256(name.encode()).digest()[:8], "big", signed=True)
    try:
        url = make_url(anchors.with_driver(uri))
    except ArgumentError:
        raise UserError("the PostgreSQL URI of the lock cannot be read: write postgresql://user@host/base") from None

    def connect() -> Connection:
        connection = postgresql.connect(url, isolation_level="AUTOCOMMIT")
        take, told = text("SELECT pg_try_advisory_lock(:key)"), False
        while not connection.scalar(take, {"key": key}):  # asked again and again: a server that is silent is frozen
            if not told:
                _say_who("another process", doing)
                told = True
            time.sleep(POLL_SECONDS)
        return connection

    try:
        connection = connect()
    except (SQLAlchemyError, ImportError) as error:
        fault = " ".join(str(getattr(error, "orig", None) or error).split())
        place = url.render_as_string(hide_password=True)
        raise UserError(f"{place}: no lock to be had ({fault}): start PostgreSQL, or correct the URI") from None
    with connection:
        yield
