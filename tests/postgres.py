"""A PostgreSQL of the tests' own, on a socket in a directory of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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


class Proxy:
    """Stands before a server of `running`. Once frozen, it takes every connection and byte, and gives none."""

    def __init__(self, uri: str, held: ExitStack) -> None:
        self._behind = f"{uri.partition('?host=')[2]}/.s.PGSQL.5432"
        self._held = held
        self._left: float = float("inf")
        self._listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.uri = f"postgresql+psycopg2://{USER}@127.0.0.1:{self._listener.getsockname()[1]}/postgres"
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self, after: int = 0) -> None:
        """No more than `after` bytes of the server's come through from now on."""
        self._left = after

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                asking = self._held.enter_context(self._listener.accept()[0])
                answering = self._held.enter_context(socket.socket(socket.AF_UNIX))
                answering.connect(self._behind)
                for pair in ((asking, answering), (answering, asking)):
                    threading.Thread(target=self._pump, args=(*pair, asking), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, asking: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(4096):
                self._left -= len(content) if sink is asking else 0
                if self._left >= 0:
                    sink.sendall(content)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def proxy(uri: str) -> Iterator[Proxy]:
    """A proxy before the server at `uri`."""
    with ExitStack() as held:
        yield Proxy(uri, held)


def _programs() -> Path | None:
    """The directory of initdb and pg_ctl; Debian keeps them off the path."""
    found = [Path(path) for path in [shutil.which("initdb")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None
