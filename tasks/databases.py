"""Dumping a database whole, and putting a dump in its place: sqlite by its backup API, PostgreSQL by its programs."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol

from sqlalchemy import URL, make_url, text
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from rlhf import postgresql
from rlhf.errors import UserError, first_line

SIDECARS = ("", "-wal", "-shm", "-journal")
"""A database and what sqlite may keep beside it: left beside another one, it would be taken for that one's."""


class Database(Protocol):
    """A database that can be dumped and replaced."""

    kind: str
    """`sqlite` or `postgresql`: a dump fits its own kind only."""
    place: str
    """Where it is, without its password."""

    def is_empty(self) -> bool:
        """Whether nothing would be lost with it."""

    def dump(self, to: Path) -> None:
        """Writes all of it, as of one moment, to a file; who uses it may go on meanwhile."""

    def replace(self, dump: Path, aside: Path, undo: ExitStack) -> None:
        """Puts a dump in its place; what was there goes to the directory `aside`, and `undo` brings it back."""


def database(uri: str) -> Database:
    """The database at a SQLAlchemy URI; raises UserError where it is no sqlite file and no PostgreSQL."""
    try:
        url = make_url(uri)
    except ArgumentError:
        raise UserError("the URI of a database cannot be read: write sqlite:////path or postgresql://...") from None
    if url.get_backend_name() == "postgresql":
        return Postgresql(url)
    if url.get_backend_name() == "sqlite" and url.database:
        return Sqlite(Path(url.database).absolute())
    place = url.render_as_string(hide_password=True)
    raise UserError(
        f"{place}: no database that is dumped here: give the server's own, sqlite:////path or postgresql://"
    )


class Sqlite:
    """A sqlite file."""

    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.place = str(path)

    def is_empty(self) -> bool:
        """Whether there is no such file, or nothing in it."""
        return not self._path.is_file() or self._path.stat().st_size == 0

    def dump(self, to: Path) -> None:
        """Copies it with sqlite's backup API; raises UserError where it cannot be read."""
        try:
            with closing(sqlite3.connect(self._path)) as source, closing(sqlite3.connect(to)) as target:
                source.backup(target)
                target.execute("PRAGMA journal_mode = DELETE")  # one file, whatever the source's mode
        except sqlite3.Error as error:
            raise UserError(f"{self._path}: {first_line(error)}: no database that can be dumped") from None

    def replace(self, dump: Path, aside: Path, undo: ExitStack) -> None:
        """Writes the dump into the file in one transaction, so that who has it open sees it, and a kill undoes it.

        Raises UserError where somebody is writing to it. A file that is no database makes room.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self.is_empty():
            undo.callback(self._path.unlink, missing_ok=True)
        elif self._is_broken():
            for suffix in SIDECARS:
                move_aside(self._path.with_name(self._path.name + suffix), aside, undo)
            undo.callback(self._path.unlink, missing_ok=True)
        else:
            before = aside / f"{dump.name}.before"
            self.dump(before)
            undo.callback(self._load, before)
        self._load(dump)

    def _load(self, dump: Path) -> None:
        with closing(sqlite3.connect(dump)) as source, closing(sqlite3.connect(self._path)) as target:
            source.backup(target)

    def _is_broken(self) -> bool:
        """Whether it is no database; raises UserError where somebody is writing to it."""
        try:
            with closing(sqlite3.connect(self._path, timeout=1)) as connection:
                connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            raise UserError(f"{self._path}: {first_line(error)}: stop what uses it (make ui, make run)") from None
        except sqlite3.DatabaseError:
            return True
        return False


class Postgresql:
    """A PostgreSQL database; its schema `public` and its extensions, which is what MLflow and Prefect use."""

    kind = "postgresql"

    def __init__(self, url: URL) -> None:
        self._url = url
        self.place = url.render_as_string(hide_password=True)

    def is_empty(self) -> bool:
        """Whether it has no tables; raises UserError where it cannot be reached."""
        try:
            with postgresql.connect(self._url.set(drivername="postgresql+psycopg2")) as connection:
                query = "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'"
                return connection.scalar(text(query)) == 0
        except SQLAlchemyError as error:
            fault = first_line(getattr(error, "orig", None) or error)
            raise UserError(f"{self.place}: {fault}: start PostgreSQL, or correct the URI") from None

    def dump(self, to: Path) -> None:
        """Writes it as SQL, of one transaction; raises UserError that says why it cannot."""
        plain = ("--no-owner", "--no-privileges", "--schema=public", "--extension=*")
        self._run("pg_dump", *plain, f"--file={to}")

    def replace(self, dump: Path, aside: Path, undo: ExitStack) -> None:
        """Runs the dump's SQL in place of all that is there, in one transaction."""
        before = aside / f"{dump.name}.before"
        if not self.is_empty():
            self.dump(before)
            undo.callback(self._load, before)
        self._load(dump)

    def _load(self, dump: Path) -> None:
        settings = ("--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1", "--output=/dev/null")
        self._run("psql", *settings, "--command=DROP SCHEMA IF EXISTS public CASCADE", f"--file={dump}")

    def _run(self, program: str, *arguments: str) -> None:
        url = self._url.set(drivername="postgresql", password=None).render_as_string(hide_password=False)
        password = {"PGPASSWORD": str(self._url.password)} if self._url.password else {}  # a command line can be seen
        command, environ = [program, f"--dbname={url}", *arguments], postgresql.PATIENCE | os.environ | password
        try:
            process = subprocess.Popen(
                command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        except FileNotFoundError:
            raise UserError(f"{program} is missing: install PostgreSQL's client programs") from None
        with process:
            try:
                said = self._last_words(process)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise UserError(f"{self.place}: {program}: {' '.join(said.split())}")

    def _last_words(self, process: subprocess.Popen[str]) -> str:
        """What a program says until it ends; it may be long about it, as long as the server answers somebody else.

        Raises UserError where it does not.
        """
        while True:
            try:
                return process.communicate(timeout=postgresql.ANSWER_SECONDS)[1]
            except subprocess.TimeoutExpired:
                self.is_empty()


def move_aside(path: Path, aside: Path, undo: ExitStack) -> None:
    """Moves a file or directory, where there is one, into the directory `aside`; `undo` moves it back."""
    if path.exists():
        kept = aside / f"{len(list(aside.iterdir()))}-{path.name}"
        shutil.move(path, kept)
        undo.callback(shutil.move, kept, path)
