"""A PostgreSQL of the tests' own, on a socket in a directory of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.programs import missing

USER = "postgres"


@contextmanager
def running() -> Iterator[str]:
    """The URI of a fresh server's database; skips the test where PostgreSQL or its driver is missing."""
    programs = _programs()
    if programs is None or find_spec("psycopg2") is None:
        missing("PostgreSQL's server" if programs is None else "psycopg2")
    place = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # short: a socket's path holds 107 characters
    data, log = place / "data", place / "log"
    as_user = []
    if os.geteuid() == 0:  # which PostgreSQL refuses to run as
        account = pwd.getpwnam(USER)
        os.chown(place, account.pw_uid, account.pw_gid)
        as_user = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]

    def run(program: str, *arguments: str) -> None:
        command = [*as_user, str(programs / program), "-D", str(data), *arguments]
        subprocess.run(command, check=True, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    try:
        run("initdb", "-U", USER, "--auth=trust", "--no-sync")
        run("pg_ctl", "-l", str(log), "-w", "-o", f"-k {place} -c listen_addresses='' -c fsync=off", "start")
        try:
            yield f"postgresql://{USER}@/postgres?host={place}"
        finally:
            run("pg_ctl", "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(place)


def _programs() -> Path | None:
    """The directory of initdb and pg_ctl; Debian keeps them off the path."""
    found = [Path(path) for path in [shutil.which("initdb")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None
