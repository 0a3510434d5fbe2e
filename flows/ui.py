"""The Prefect and MLflow pages of this checkout and a worker for its deployments, until Ctrl-C.

    python -m flows.ui

A server that is configured already (PREFECT_API_URL, MLFLOW_TRACKING_URI) is named and not started a second time;
nor does a worker start then: who may run what is that server's matter. PREFECT_SERVER_API_PORT moves Prefect's page.
Where RLHF_PASSWORD is set, both ask for a log-in (rlhf/access.py).
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from flows import servers
from rlhf import access, anchors, process
from rlhf.errors import UserError, run_command
from tasks.summary import MLFLOW_UI_PORT

PREFECT_UI_PORT = 4200


def main(arguments: Sequence[str] = ()) -> int:
    """Starts what is not running yet, prints the addresses and waits; returns the exit code."""
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(prog="ui", description=__doc__, formatter_class=style).parse_args(arguments)
    process.interrupt_on(signal.SIGTERM)
    return run_command("ui", _serve)


def _serve() -> None:
    with suppress(KeyboardInterrupt), ExitStack() as running:
        print("starting, which takes half a minute ...", flush=True)
        started = [start_prefect(running), _mlflow(running)]
        for name, address, own in started:
            if own:
                own.wait()
            print(f"{name:8} {address}", flush=True)
        _, prefect, own_prefect = started[0]
        if own_prefect:
            running.enter_context(servers.configured(prefect))
            started.append(_worker(running, prefect))
        log_in = f"log in as {access.USER} with ${access.VARIABLE}; " if access.password() else ""
        print(f"{log_in}Ctrl-C stops them", flush=True)
        while True:
            for _, _, own in started:
                if own:
                    own.check()
            time.sleep(1)
    print()


def start_prefect(running: ExitStack) -> tuple[str, str, servers.Server | None]:
    """Prefect's page: its name, its address, and the server where it is ours."""
    servers.set_prefect_environment()
    port = servers.port("PREFECT_SERVER_API_PORT", PREFECT_UI_PORT)  # before Prefect meets a wrong one
    if port == MLFLOW_UI_PORT:
        raise UserError(f"PREFECT_SERVER_API_PORT={port}: MLflow's page is served there: take another port")
    from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL

    if PREFECT_API_URL.value():
        return "Prefect", str(PREFECT_UI_URL.value() or PREFECT_API_URL.value()), None
    address = f"http://{servers.HOST}:{port}"
    servers.require_free(port)
    return "Prefect", address, running.enter_context(servers.prefect_server(port, access.for_prefect()))


def _worker(running: ExitStack, prefect: str) -> tuple[str, str, servers.Server]:
    """Registers the deployments of prefect.yaml and starts the worker that runs them."""
    from flows import deployments

    deployments.register()
    port = str(servers.free_port())
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", deployments.POOL, "--with-healthcheck"]
    listens = {"PREFECT_WORKER_WEBSERVER_HOST": servers.HOST, "PREFECT_WORKER_WEBSERVER_PORT": port}
    worker = running.enter_context(servers.server("worker", command, f"http://{servers.HOST}:{port}/health", listens))
    worker.wait()
    address = f"{prefect}/deployments"
    print(f"{'worker':8} runs what {address} starts", flush=True)
    return "worker", address, worker


def _mlflow(running: ExitStack) -> tuple[str, str, servers.Server | None]:
    """MLflow's page, likewise."""
    uri = anchors.tracking_uri()
    if anchors.is_remote(uri):
        return "MLflow", uri, None
    address = f"http://{servers.HOST}:{MLFLOW_UI_PORT}"
    servers.require_free(MLFLOW_UI_PORT)
    command = [sys.executable, "-m", "mlflow", "server", "--host", servers.HOST, "--port", str(MLFLOW_UI_PORT)]
    command += ["--workers", "1", "--default-artifact-root", anchors.artifact_root().as_uri()]
    environ = {"MLFLOW_BACKEND_STORE_URI": uri}  # not for a process list to show: it may hold a password
    if access.password():
        command += ["--app-name", "basic-auth"]
        environ |= access.for_mlflow(Path(running.enter_context(TemporaryDirectory())))
    return "MLflow", address, running.enter_context(servers.server("mlflow", command, f"{address}/health", environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
