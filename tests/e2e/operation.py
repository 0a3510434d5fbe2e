"""A night and a morning: runs of the deployments against real servers, and what these can be asked about them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, LogFilter
from prefect.client.schemas.objects import Artifact, FlowRun, State, TaskRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.states import Cancelling, StateType

from rlhf import tracking
from tests.e2e import servers, workspaces
from tests.e2e.servers import Servers, wait_until

RUN_SECONDS = 1200.0
"""A run at smoke scale takes a minute and a half on two idle cores."""
ITERATIONS = 4
SCALE = os.environ.get("SCREENSHOTS_SCALE", "smoke")
# A start that gets some problems right, and a gate that no policy passes.
LIVELY = [
    "data.generator.train=1000",
    "sft.tiny.hidden_size=64",
    "sft.tiny.intermediate_size=128",
    "sft.finetune.steps=300",
    "sft.finetune.lr=0.006",
    f"ppo.iterations={ITERATIONS}",
    "gate.min_gain=1",
]
OVERRIDES = ["runtime.threads=1", *(LIVELY if SCALE == "smoke" else [])]
CHOICES = {"scale": SCALE, "seed": "fixed", "overrides": OVERRIDES}
MODEL = "gsm8k-policy"
REASON = "the test's own: nobody waits for a policy of this size"


@dataclass(frozen=True)
class Operation:
    """The servers, and the flow runs that they were asked for."""

    servers: Servers
    place: Path
    """The checkout whose deployments these are."""
    client: SyncPrefectClient
    mlflow: MlflowClient

    def deployment(self, name: str) -> DeploymentResponse:
        return self.client.read_deployment_by_name(name)

    def start(self, deployment: str, **parameters: Any) -> UUID:
        """Starts a run as the form does."""
        return self.client.create_flow_run_from_deployment(self.deployment(deployment).id, parameters=parameters).id

    def runs(self, deployment: str) -> list[UUID]:
        """All runs of a deployment."""
        wanted = FlowRunFilter.model_validate({"deployment_id": {"any_": [self.deployment(deployment).id]}})
        return sorted(run.id for run in self.client.read_flow_runs(flow_run_filter=wanted))

    def state(self, run: UUID) -> State[Any]:
        found = self.client.read_flow_run(run).state
        assert found is not None
        return found

    def cancel(self, run: UUID) -> State[Any]:
        """What the page's button does; the last state, which this waits for."""
        self.client.set_flow_run_state(run, Cancelling())
        return self.end(run)

    def says(self, run: UUID, text: str, task: str | None = None) -> str:
        """The first line with `text`, which this waits for: lines come in batches, after the end of a run too."""

        def found() -> list[str]:
            return [line for line in self.log(run, task) if text in line]

        wait_until(found, f"a line with {text!r}", RUN_SECONDS)
        return found()[0]

    def end(self, run: UUID) -> State[Any]:
        """The last state of a flow run, which this waits for."""
        wait_until(lambda: self.state(run).is_final(), f"the end of flow run {run}", RUN_SECONDS)
        return self.state(run)

    def tasks(self, run: UUID) -> dict[str, TaskRun]:
        """The task runs by name."""
        found = self.client.read_task_runs(flow_run_filter=_flow_run(run))
        assert len({task.name for task in found}) == len(found)
        return {task.name: task for task in found}

    def log(self, run: UUID, task: str | None = None) -> list[str]:
        """The lines of a flow run, or of one of its tasks, the first one first."""
        kind, identity = ("task_run_id", self.tasks(run)[task].id) if task else ("flow_run_id", run)
        wanted = LogFilter.model_validate({kind: {"any_": [identity]}})
        lines: list[str] = []
        while more := self.client.read_logs(wanted, limit=200, offset=len(lines)):
            lines += [entry.message for entry in more]
        return lines

    def artifacts(self, run: UUID) -> dict[str, Artifact]:
        """The artifacts of a flow run by key."""
        wanted = ArtifactFilter.model_validate({"flow_run_id": {"any_": [run]}})
        return {str(one.key): one for one in self.client.read_artifacts(artifact_filter=wanted)}

    def pipeline(self, run: UUID) -> Run:
        """The MLflow run of a flow run."""
        name = self.client.read_flow_run(run).name
        (found,) = [one for one in self.mlflow_runs() if one.data.tags.get("prefect.flow_run") == name]
        return found

    def children(self, run: UUID) -> dict[str, Run]:
        """The MLflow runs of a flow run's stages."""
        parent = self.pipeline(run).info.run_id
        found = [one for one in self.mlflow_runs() if one.data.tags.get("mlflow.parentRunId") == parent]
        assert len({one.data.tags["stage"] for one in found}) == len(found)
        return {one.data.tags["stage"]: one for one in found}

    def mlflow_runs(self) -> list[Run]:
        experiment = self.mlflow.get_experiment_by_name(tracking.EXPERIMENT)
        assert experiment is not None
        return list(self.mlflow.search_runs([experiment.experiment_id], max_results=500))

    @cached_property
    def night(self) -> UUID:
        """A run of pipeline/nightly that Prefect's scheduler made, ended. Its schedule is the nightly one again."""
        deployment = self.deployment("pipeline/nightly")
        (nightly,) = deployment.schedules
        assert isinstance(nightly.schedule, CronSchedule)
        # What a person does who does not want to wait for the night: another hour, on the deployment's page.
        each_minute = CronSchedule(cron="* * * * *", timezone=nightly.schedule.timezone)
        self.client.update_deployment_schedule(deployment.id, nightly.id, schedule=each_minute)
        wait_until(lambda: self._nights(StateType.RUNNING), "a scheduled run to start")
        self.client.update_deployment_schedule(deployment.id, nightly.id, schedule=nightly.schedule)
        (run,) = self._nights(StateType.RUNNING)
        self.end(run.id)
        return run.id

    def nights_to_come(self) -> list[FlowRun]:
        """The runs that Prefect has scheduled."""
        wait_until(lambda: self._nights(StateType.SCHEDULED), "Prefect to schedule the nights to come")
        return self._nights(StateType.SCHEDULED)

    def _nights(self, state: StateType) -> list[FlowRun]:
        wanted = FlowRunFilter.model_validate(
            {
                "deployment_id": {"any_": [self.deployment("pipeline/nightly").id]},
                "state": {"type": {"any_": [state]}},
            }
        )
        return self.client.read_flow_runs(flow_run_filter=wanted)

    @cached_property
    def morning(self) -> UUID:
        """The same choices once more, in the form; ended. Nothing has changed since the night."""
        assert self.night
        run = self.start("pipeline/on-demand", choices=CHOICES)
        self.end(run)
        return run

    @cached_property
    def promotion(self) -> UUID:
        """The night's policy made champion by hand, in the form; ended."""
        assert self.night
        run = self.start("promote/by-hand", version=1, reason=REASON)
        self.end(run)
        return run


def _flow_run(run: UUID) -> FlowRunFilter:
    return FlowRunFilter.model_validate({"id": {"any_": [run]}})


@contextmanager
def running(place: Path) -> Iterator[Operation]:
    """An operation in a copy of this checkout at `place`/checkout, whose night takes a minute instead of an hour."""
    checkout = workspaces.copy_checkout(place / "checkout")
    file = checkout / "prefect.yaml"
    written = yaml.safe_load(file.read_text())
    (nightly,) = [entry for entry in written["deployments"] if entry["name"] == "nightly"]
    nightly["parameters"] = {"choices": CHOICES}
    file.write_text(yaml.safe_dump(written, sort_keys=False))
    workspaces.commit(checkout)
    environ = workspaces.environment(place) | {"PREFECT_HOME": str(place / "prefect")}
    with servers.running(checkout, environ) as found, found.prefect_client() as client:
        yield Operation(found, checkout, client, found.mlflow_client())
