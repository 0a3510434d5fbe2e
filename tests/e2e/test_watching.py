"""A real Prefect server and worker on loopback: what a run shows, how it is cancelled, and whom it tells.

The stages are stand-ins in a checkout of their own; the flow, the stage task, the supervisor and DVC are the real ones.
All runs are started at once, for they take turns on the device; each test looks at its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from rlhf import config
from rlhf.anchors import CHECKOUT
from tasks.supervisor import LINUX, descendants
from tests.e2e.servers import answers, process, wait_until

pytestmark = pytest.mark.skipif(not LINUX, reason="counts processes in /proc")

LEFT_SECONDS = 30
"""So long after the end of a flow nothing may be left of its stages."""
SILENCE_SECONDS = 60.0
"""Without heartbeats for so long a run is stuck; they come every 30 seconds, Prefect's least."""

FLOW = """
from prefect import flow
from tasks.dvc_stages import run_stage

@flow(name="pipeline", persist_result=False)
def watched(stage: str) -> None:
    run_stage(stage, "")
"""

DVC_YAML = """
stages:
  train_ppo:
    cmd: python -m torch.distributed.run --standalone --nproc_per_node=2 loop.py
    params: [runtime]
    always_changed: true
  evaluate:
    cmd: python loop.py
    params: [runtime]
    always_changed: true
  collect_preferences:
    cmd: python loop.py 20
    metrics: [metrics/preferences.json]
  train_reward:
    cmd: python loop.py
    always_changed: true
  fetch_sft:
    cmd: python -c "import sys; sys.exit('fetch_sft - hub - out of reach')"
    always_changed: true
  register:
    cmd: python -c "print('register - gsm8k-policy version 2 - refused by the gate, no gain')"
    always_changed: true
"""

LOOP = """
import itertools, json, pathlib, sys, time
from rlhf import process
process.end_with_supervisors()  # as stages do
total = int(sys.argv[1]) if sys.argv[1:] else 10**6
for done in range(1, total + 1):
    bar = "█" * min(done, 20)
    print(f"working {bar}░ {done}/{total} {done}s score 0.5", flush=True)
    time.sleep(0.5)
pathlib.Path("metrics").mkdir(exist_ok=True)
pathlib.Path("metrics/preferences.json").write_text(json.dumps({"pairs": 8}))
"""


class Webhook:
    """A server on loopback that keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.messages.append(json.loads(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wait_for(self, what: str, run_name: str) -> dict[str, str]:
        def found() -> list[dict[str, str]]:
            return [one for one in self.messages if (one["what"], one["flow_run"]) == (what, run_name)]

        wait_until(found, f"a message that {run_name} is {what}, among {self.messages}")
        return found()[0]


@dataclass
class Watched:
    """The server, a worker, and the checkout in which the worker's flows run."""

    client: Any
    place: Path
    deployments: dict[str, UUID]
    webhook: Webhook
    worker: subprocess.Popen[str]

    def start(self, stage: str, pool: str = "busy", **options: Any) -> Run:
        parameters = {"stage": stage}
        made = self.client.create_flow_run_from_deployment(self.deployments[pool], parameters=parameters, **options)
        return Run(self, made.id, made.name, stage)

    def processes(self) -> list[int]:
        """The flows and all processes below them: they work in the checkout, the worker does not."""
        return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and _works_in(one) == self.place]

    def is_left_alone(self) -> None:
        """Returns once no process works in the checkout and nobody holds the device."""
        wait_until(lambda: not self.processes() and not self.lock_is_held(), "what is left to end", LEFT_SECONDS)

    def lock_is_held(self) -> bool:
        with (self.place / ".cache" / "devices" / "cpu.lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


@dataclass
class Run:
    """A flow run."""

    watched: Watched
    id: UUID
    name: str
    stage: str

    @property
    def state(self) -> Any:
        return self.watched.client.read_flow_run(self.id).state

    def end(self) -> Any:
        """Its last state."""
        wait_until(lambda: self.state.is_final(), f"{self.stage} to end")
        return self.state

    def cancel(self) -> None:
        """What `prefect flow-run cancel` and the UI's button do."""
        from prefect.states import Cancelling

        self.watched.client.set_flow_run_state(self.id, Cancelling())

    def log(self) -> list[str]:
        from prefect.client.schemas.filters import LogFilter

        wanted = LogFilter.model_validate({"flow_run_id": {"any_": [self.id]}})
        return [entry.message for entry in self.watched.client.read_logs(wanted)]

    def says(self, text: str) -> None:
        """Returns once its log has a line with `text`."""
        wait_until(lambda: any(text in line for line in self.log()), f"{self.stage} to say {text!r}")

    def artifacts(self) -> dict[str, Any]:
        from prefect.client.schemas.filters import ArtifactFilter

        wanted = ArtifactFilter.model_validate({"flow_run_id": {"any_": [self.id]}})
        return {one.key: one for one in self.watched.client.read_artifacts(artifact_filter=wanted)}

    def flow_process(self) -> int:
        """The process of the flow: of those that know this run, the one above the others."""
        marker = str(self.id).encode()
        knowing = [pid for pid in self.watched.processes() if marker in _environ(pid)]
        return max(knowing, key=lambda pid: len(descendants(pid)))


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def _works_in(process: Path) -> Path | None:
    try:
        return (process / "cwd").readlink()
    except OSError:
        return None


def worker_for(pool: str) -> list[str]:
    return [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]


def is_prefect(pid: int) -> bool:
    return b"supervisor.py" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def make_checkout(place: Path) -> Path:
    for house in ("flows", "tasks", "rlhf", "conf"):
        shutil.copytree(CHECKOUT / house, place / house, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in {"watched_flow.py": FLOW, "dvc.yaml": DVC_YAML, "loop.py": LOOP}.items():
        (place / name).write_text(text)
    raw = config.compose(["scale=smoke", "runtime.device=cpu", "limits.train_reward_seconds=3"])
    config.write(raw, place / "params.yaml")
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=place, check=True)
    return place


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.context import refresh_global_settings_context

    from flows import automations, servers

    place, logs = make_checkout(tmp_path_factory.mktemp("checkout")), tmp_path_factory.mktemp("logs")
    address = f"http://{servers.HOST}:{servers.free_port()}"
    with pytest.MonkeyPatch.context() as patch, ExitStack() as running:
        for name, value in {
            "PREFECT_API_URL": f"{address}/api",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS": "1",
            "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "1",
        }.items():
            patch.setenv(name, value)
        refresh_global_settings_context()
        port = address.rpartition(":")[2]
        server = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
        server += ["--log-level", "error", "--host", servers.HOST, "--port", port]
        running.enter_context(process(server, logs / "server", logs))
        wait_until(lambda: answers(f"{address}/api/health"), "the server")
        client = running.enter_context(get_client(sync_client=True))
        flow = client.create_flow_from_name("pipeline")
        deployments = {}
        for pool in ("busy", "idle"):  # nobody works for the second
            client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
            deployments[pool] = client.create_deployment(
                flow,
                pool,
                entrypoint="watched_flow.py:watched",
                work_pool_name=pool,
                pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(place)}}],
            )
        webhook = Webhook()
        automations.install(webhook.url, silence_seconds=SILENCE_SECONDS)
        worker = running.enter_context(process(worker_for("busy"), logs / "worker", logs))
        yield Watched(client, place, deployments, webhook, worker)
    refresh_global_settings_context()


@pytest.fixture(scope="module")
def ended(watched: Watched) -> dict[str, Run]:
    """Runs that end by themselves, started at once."""
    return {stage: watched.start(stage) for stage in ("collect_preferences", "train_reward", "fetch_sft", "register")}


def test_a_run_shows_its_progress_and_its_metrics(ended: dict[str, Run]) -> None:
    run = ended["collect_preferences"]
    assert run.end().is_completed(), run.state
    found = run.artifacts()
    assert float(found["progress-collect-preferences"].data) == 100
    assert found["progress-collect-preferences"].description == "working 20/20 20s score 0.5"
    assert json.loads(found["metrics-collect-preferences"].data) == [{"metric": "pairs", "value": 8}]


def test_a_stage_over_its_limit_ends_with_a_line_that_names_the_param(watched: Watched, ended: dict[str, Run]) -> None:
    run = ended["train_reward"]
    assert run.end().is_failed()
    assert "limits.train_reward_seconds=3: it took longer and was ended: raise the limit" in run.state.message
    assert "limits.train_reward_seconds=3" in watched.webhook.wait_for("failed", run.name)["message"]


def test_a_crashed_stage_fails_the_run_with_its_own_line(watched: Watched, ended: dict[str, Run]) -> None:
    run = ended["fetch_sft"]
    assert run.end().is_failed()
    assert "fetch_sft - hub - out of reach" in run.state.message
    message = watched.webhook.wait_for("failed", run.name)
    assert message["state"] == "Failed"
    assert str(run.id) in message["page"]


def test_a_refused_policy_is_told(watched: Watched, ended: dict[str, Run]) -> None:
    run = ended["register"]
    assert run.end().is_completed()
    message = watched.webhook.wait_for("refused by the gate", run.name)
    assert message["message"] == "register - gsm8k-policy version 2 - refused by the gate, no gain"


def test_a_late_run_is_told(watched: Watched) -> None:
    run = watched.start("register", "idle")
    assert watched.webhook.wait_for("late", run.name)["state"] == "Late"


def test_a_cancelled_run_leaves_nothing_and_one_that_waits_for_the_device_starts_nothing(watched: Watched) -> None:
    first = watched.start("evaluate")
    first.says("score 0.5")
    second = watched.start("evaluate")
    second.says("waiting for device cpu, which process ")
    second.cancel()
    assert second.end().is_cancelled()
    assert not any("score" in line for line in second.log())
    first.cancel()
    assert first.end().is_cancelled()
    watched.is_left_alone()


def test_a_killed_flow_leaves_no_rank_and_is_crashed_at_once(watched: Watched) -> None:
    """The flow's worker tells Prefect of it."""
    run = watched.start("train_ppo")
    run.says("score 0.5")
    flow = run.flow_process()
    assert len(descendants(flow)) >= 6  # supervisor, deputy, dvc, torchrun, two ranks
    assert watched.lock_is_held()
    os.kill(flow, signal.SIGKILL)
    watched.is_left_alone()
    assert run.end().is_crashed()
    watched.webhook.wait_for("failed", run.name)


@pytest.mark.parametrize("stage", ["evaluate", "train_ppo"])
def test_supervisor_and_deputy_killed_at_the_same_moment_leave_nothing(watched: Watched, stage: str) -> None:
    run = watched.start(stage)
    run.says("score 0.5")
    guards = [pid for pid in descendants(run.flow_process()) if not is_prefect(pid)]
    assert len(guards) == 2
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, neither sees the other one end
        for pid in guards:
            os.kill(pid, number)
    watched.is_left_alone()
    assert run.end().is_failed()


def test_a_worker_that_is_told_to_end_leaves_nothing(watched: Watched) -> None:
    run = watched.start("evaluate")
    run.says("score 0.5")
    watched.worker.terminate()
    watched.is_left_alone()
    assert run.end().is_final()


def test_a_flow_that_dies_with_its_worker_is_stuck_and_becomes_crashed(watched: Watched, tmp_path: Path) -> None:
    """Nobody is left to tell Prefect; only the heartbeats stop."""
    with process(worker_for("idle"), tmp_path / "worker", tmp_path):
        run = watched.start("evaluate", "idle")
        run.says("score 0.5")
        flow = run.flow_process()
        above = [pid for pid in descendants(os.getpid()) if flow in descendants(pid) and is_prefect(pid)]
        assert above  # the worker, at least
        for pid in (*above, flow):
            os.kill(pid, signal.SIGKILL)
        watched.is_left_alone()
    assert run.end().is_crashed()
    assert run.state.message == "no heartbeat for 60 s: the flow's process or machine is gone"
    assert watched.webhook.wait_for("stuck", run.name)["flow_run"] == run.name
