"""Real servers on loopback, as a user starts them: MLflow on PostgreSQL, and `make ui` beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient

from flows.servers import HOST, free_port
from rlhf.anchors import with_driver
from tasks.processes import supervised
from tasks.supervisor import descendants
from tests import postgres

START_SECONDS, END_SECONDS = 300.0, 60.0
"""Three times what the slowest start and end took on two busy cores."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.25)


def answers(url: str) -> bool:
    try:
        urlopen(url, timeout=10).close()
    except OSError:
        return False
    return True


@contextmanager
def process(
    command: Sequence[str], log: Path, directory: Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A child process whose output is in `log`; nothing of it is left afterwards."""
    with (
        log.open("w") as output,
        supervised(command, directory=directory, environ=environ or {}, output=output) as started,
    ):
        yield started


def wait_for(started: subprocess.Popen[str], condition: Callable[[], object], log: Path) -> None:
    """Returns once the condition holds; fails with the log where the process ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert started.poll() is None and time.monotonic() < deadline, f"{log.name}:\n{log.read_text()[-3000:]}"
        time.sleep(0.25)


@dataclass(frozen=True)
class Servers:
    """Where the servers answer."""

    mlflow: str
    """MLflow's address: its page, and the tracking URI."""
    prefect: str
    """The address of Prefect's page; its API is below it at /api."""
    artifacts: Path
    """Where MLflow's server keeps artifacts."""

    def mlflow_client(self) -> MlflowClient:
        return MlflowClient(self.mlflow)

    @contextmanager
    def prefect_client(self) -> Iterator[SyncPrefectClient]:
        with SyncPrefectClient(f"{self.prefect}/api") as client:
            yield client


@contextmanager
def running(checkout: Path, environ: Mapping[str, str]) -> Iterator[Servers]:
    """MLflow's server on a fresh PostgreSQL with an artifact store, and `make ui` of the checkout, which uses it.

    Skips where PostgreSQL is missing. On leaving `make ui` gets its Ctrl-C and has to take everything along.
    """
    logs = checkout.parent / "logs"
    logs.mkdir(exist_ok=True)
    port = str(free_port())
    found = Servers(f"http://{HOST}:{free_port()}", f"http://{HOST}:{port}", checkout.parent / "artifacts")
    with ExitStack() as stack:
        database = stack.enter_context(postgres.running())
        places = {
            "MLFLOW_BACKEND_STORE_URI": with_driver(database),
            "MLFLOW_ARTIFACTS_DESTINATION": str(found.artifacts),
        }
        options = ["--host", HOST, "--port", found.mlflow.rpartition(":")[2], "--workers", "1", "--serve-artifacts"]
        command = [sys.executable, "-m", "mlflow", "server", *options]
        mlflow = stack.enter_context(process(command, logs / "mlflow", checkout, {**environ, **places}))
        settings = {
            "MLFLOW_TRACKING_URI": found.mlflow,
            "PREFECT_SERVER_API_PORT": port,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
        }
        # The server is up when flows need it: `make ui` starts meanwhile.
        command = [sys.executable, "-m", "flows.ui"]
        ui = stack.enter_context(process(command, logs / "ui", checkout, {**environ, **settings}))
        wait_for(mlflow, lambda: answers(f"{found.mlflow}/health"), logs / "mlflow")
        wait_for(ui, lambda: "Ctrl-C stops them" in (logs / "ui").read_text(), logs / "ui")
        yield found
        _stop(ui, found.prefect)


def _stop(ui: subprocess.Popen[str], address: str) -> None:
    """Ctrl-C: everything below ends, and the port is free again."""
    below = descendants(ui.pid)
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below}
    (own,) = [pid for pid, line in lines.items() if b"flows.ui" in line and b"supervisor.py" not in line]
    os.kill(own, signal.SIGINT)
    assert ui.wait(END_SECONDS) == 0
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
    assert not answers(f"{address}/api/health")
