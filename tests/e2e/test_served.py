"""`python -m flows.serve` for real: the deployments of prefect.yaml from one process, without a work pool."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State

from flows.deployments import entries, full_name
from flows.servers import HOST, free_port
from tasks.supervisor import LINUX, descendants
from tests.e2e import servers, workspaces
from tests.e2e.servers import wait_for, wait_until

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not LINUX, reason="finds processes in /proc"),
]


def test_it_serves_every_deployment_runs_one_and_leaves_nothing(tmp_path: Path) -> None:
    checkout = workspaces.copy_checkout(tmp_path / "checkout")
    workspaces.commit(checkout)
    port, log = str(free_port()), tmp_path / "log"
    environ = workspaces.environment(tmp_path) | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_API_PORT": port,
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
    }
    command = [sys.executable, "-m", "flows.serve"]
    with (
        servers.process(command, log, checkout, environ) as serving,
        SyncPrefectClient(f"http://{HOST}:{port}/api") as client,
    ):
        wanted = {full_name(entry) for entry in entries()}
        wait_for(serving, lambda: servers.answers(f"http://{HOST}:{port}/api/health"), log)
        wait_for(serving, lambda: len(client.read_deployments()) == len(wanted), log)
        found = {f"{client.read_flow(one.flow_id).name}/{one.name}": one for one in client.read_deployments()}
        assert set(found) == wanted
        assert all(one.work_pool_name is None for one in found.values())
        (schedule,) = found["pipeline/nightly"].schedules
        assert schedule.active

        parameters = {"reason": "nothing was registered yet"}
        run = client.create_flow_run_from_deployment(found["rollback/by-hand"].id, parameters=parameters).id

        def state() -> State[Any]:
            found = client.read_flow_run(run).state
            assert found is not None
            return found

        wait_until(lambda: state().is_final(), "the served run to end")
        assert state().is_failed()  # there is nothing to go back to, which only our code says
        assert "no model gsm8k-policy is registered: run the pipeline first" in str(state().message)

        below = descendants(serving.pid)
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below}
        (own,) = [pid for pid, line in lines.items() if b"flows.serve" in line and b"supervisor.py" not in line]
        said = log.read_text()  # Prefect's traceback of the failed run, for one
        os.kill(own, signal.SIGTERM)
        assert serving.wait(servers.END_SECONDS) == 0
        last = log.read_text().removeprefix(said)
        assert "paused" in last and "Traceback" not in last
        assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
        assert not servers.answers(f"http://{HOST}:{port}/api/health")
