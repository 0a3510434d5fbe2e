"""Local servers that end with the process that needs them: Prefect's for a flow, both for `make ui`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from rlhf import access, anchors
from rlhf.errors import UserError
from tasks.processes import supervised

HOST = "127.0.0.1"
HEARTBEAT_SECONDS = 60
"""How often a flow says that it is alive: often enough for a dead one to be known as such within five minutes."""
START_SECONDS, ANSWER_SECONDS, DRAIN_SECONDS = 120.0, 10.0, 5.0


def set_prefect_environment() -> None:
    """Keeps Prefect's database in the main checkout, so that flows and `make ui` share it. Before prefect is imported.

    What the user has set wins: PREFECT_HOME, and the profiles of the home directory, which may name a server. Raises
    UserError where a file is in the database's way.
    """
    home = Path(os.environ.get("PREFECT_HOME") or anchors.main_checkout() / ".prefect").expanduser()
    if not next(path for path in (home, *home.parents) if path.exists()).is_dir():
        raise UserError(f"PREFECT_HOME={home}: no directory: Prefect keeps its database there: name one, or unset it")
    if not os.environ.get("PREFECT_HOME"):
        profiles = Path.home() / ".prefect" / "profiles.toml"
        if profiles.is_file():
            os.environ.setdefault("PREFECT_PROFILES_PATH", str(profiles))
        home.mkdir(exist_ok=True)  # Prefect would only warn, and go on without it
        os.environ["PREFECT_HOME"] = str(home)
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", str(HEARTBEAT_SECONDS))
    os.environ.setdefault("DO_NOT_TRACK", "true")
    for name, value in access.for_clients().items():
        os.environ.setdefault(name, value)
    access.past_proxies()


@contextmanager
def prefect_api() -> Iterator[Callable[[], None]]:
    """A Prefect API for the flows of this process: the configured one, or else a server of their own.

    Yields a function that waits until flows can start. Prefect's own temporary server would share the terminal's
    signals and be gone before the flow can report that it was interrupted; and it would outlive a killed flow.
    """
    set_prefect_environment()
    from prefect.settings import PREFECT_API_URL

    if users_own := PREFECT_API_URL.value():
        yield lambda: require_answer(users_own)
        return
    port = free_port()
    application = ["uvicorn", "--factory", "prefect.server.api.server:create_app", "--log-level", "error"]
    command = [sys.executable, "-m", *application, "--host", HOST, "--port", str(port)]
    address = f"http://{HOST}:{port}"
    with configured(address), server("prefect", command, f"{address}/api/health", access.for_prefect()) as own:
        try:
            yield own.wait
        finally:
            _drain()


@contextmanager
def configured(address: str) -> Iterator[None]:
    """Has this process and its children use the Prefect server at `address`."""
    from prefect.context import refresh_global_settings_context

    os.environ["PREFECT_API_URL"] = f"{address}/api"
    refresh_global_settings_context()
    try:
        yield
    finally:
        del os.environ["PREFECT_API_URL"]
        refresh_global_settings_context()


def _drain() -> None:
    """Sends the logs and events that Prefect's background threads still hold, before their server ends."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=DRAIN_SECONDS)
    EventsWorker.drain_all(timeout=DRAIN_SECONDS)


class Server:
    """A child process that serves HTTP; its output goes to a file."""

    def __init__(self, name: str, process: subprocess.Popen[str], health: str, log: Path) -> None:
        self._name, self._process, self._health, self._log = name, process, health, log

    def wait(self) -> None:
        """Returns once the server answers; raises UserError where it ends or takes too long instead."""
        deadline = time.monotonic() + START_SECONDS
        while not _answers(self._health):
            self.check()
            if time.monotonic() > deadline:
                raise UserError(f"the {self._name} server: no answer within {START_SECONDS:.0f} s: see {self._log}")
            time.sleep(0.1)

    def check(self) -> None:
        """Raises UserError with the server's last line where it has ended."""
        if self._process.poll() is not None:
            raise UserError(f"the {self._name} server: ended with {_last_line(self._log)!r}: see {self._log}")


@contextmanager
def server(
    name: str, command: Sequence[str], health: str, environ: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Starts `command`, which serves the URL `health`, and ends it on leaving. Its output is in runs/servers/.

    `environ` is laid over this process's environment.
    """
    log = anchors.main_checkout() / "runs" / "servers" / f"{name}-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as output,
        supervised(command, directory=anchors.CHECKOUT, environ=environ or {}, output=output) as process,
    ):
        yield Server(name, process, health, log)


def prefect_server(port: int, environ: Mapping[str, str]) -> AbstractContextManager[Server]:
    """Prefect's server with its page, on a port of this machine."""
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST]
    command += ["--port", str(port), "--log-level", "WARNING"]
    return server("prefect", command, f"http://{HOST}:{port}/api/health", environ)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:  # URLError is one, and so is a connection that breaks
        return False


def require_answer(address: str, variable: str = "PREFECT_API_URL", is_well: bool = False) -> None:
    """Raises UserError where nobody answers at the `address` that `variable` names; with `is_well`, for an error too.

    Otherwise what the server answers is its client's matter.
    """
    try:
        urlopen(f"{address.rstrip('/')}/health", timeout=ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        if isinstance(error, HTTPError) and not is_well:
            return
        reason = getattr(error, "reason", error)
        raise UserError(f"{variable}={address}: {reason}: start that server, or unset it to use none") from None


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def port(variable: str, default: int) -> int:
    """The port that an environment variable names; raises UserError where that is none."""
    value = os.environ.get(variable) or str(default)
    if not (value.isdecimal() and 0 < int(value) < 2**16):
        raise UserError(f"{variable}={value}: no port: write a number from 1 to 65535, or leave it out for {default}")
    return int(value)


def require_free(port: int) -> None:
    """Raises UserError where somebody listens on the port already."""
    with socket.socket() as attempt:
        if attempt.connect_ex((HOST, port)) == 0:
            raise UserError(f"port {port} is taken: another make ui may be running: stop what listens on it")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")
