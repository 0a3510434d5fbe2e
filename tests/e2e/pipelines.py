"""A workspace in which the whole pipeline has run, and how tests look at it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from mlflow import MlflowClient
from mlflow.entities import Run

from rlhf import config, tracking
from rlhf.data.gsm8k import Problem, read_prepared
from rlhf.params import Params
from tests.e2e import workspaces


@dataclass(frozen=True)
class Pipeline:
    """A workspace in which `dvc repro` has run once."""

    place: Path
    tracking: Path
    started: datetime
    output: str
    """What that `dvc repro` printed."""

    @classmethod
    def run(cls, place: Path, tracking: Path, *choices: str) -> Pipeline:
        """Copies this checkout to `place`, composes the params, commits, and runs `dvc repro`."""
        environ, started = workspaces.environment(tracking), datetime.now(UTC)
        workspaces.copy_checkout(place)
        workspaces.succeed(["python", "-m", "rlhf.config", "compose", *choices], place, environ)
        workspaces.commit(place)
        pipeline = cls(place, tracking, started, workspaces.succeed(["dvc", "repro"], place, environ))
        assert len(pipeline.runs) == len(pipeline.all_runs())
        return pipeline

    @property
    def environ(self) -> dict[str, str]:
        return workspaces.environment(self.tracking)

    @cached_property
    def params(self) -> Params:
        return config.load((), self.place / "params.yaml")

    @cached_property
    def client(self) -> MlflowClient:
        return MlflowClient(self.environ["MLFLOW_TRACKING_URI"])

    @cached_property
    def runs(self) -> Mapping[str, Run]:
        """The MLflow runs of the first `dvc repro`, by stage: read before there are others."""
        return {run.data.tags["stage"]: run for run in self.all_runs()}

    def all_runs(self) -> list[Run]:
        """Every MLflow run, the latest one first."""
        experiment = self.client.get_experiment_by_name(tracking.EXPERIMENT)
        assert experiment is not None
        return list(self.client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"]))

    def server_state(self) -> str:
        """All that the server shows of models, versions and runs, down to when they were last changed."""
        models, versions = self.client.search_registered_models(), self.client.search_model_versions()
        return "\n".join(map(repr, [*models, *versions, *self.all_runs()]))

    def steps(self, run: Run, key: str) -> list[int]:
        """The steps at which the run has points of a metric."""
        return sorted(metric.step for metric in self.client.get_metric_history(run.info.run_id, key))

    def json(self, path: str) -> Any:
        return json.loads((self.place / path).read_text())

    def problems(self, split: str) -> list[Problem]:
        return read_prepared(self.place / f"data/prepared/{split}.parquet")

    def locked(self) -> dict[str, dict[str, str]]:
        """What dvc.lock says: stage -> path of an output -> md5."""
        return workspaces.locked_outs(self.place)

    def succeed(self, *command: str) -> str:
        return workspaces.succeed([*command], self.place, self.environ)

    def train_ppo(self, *overrides: str, state: Path) -> str:
        """Runs the stage by hand and returns what it printed."""
        environ = self.environ | {"RLHF_STATE_DIR": str(state)}
        return workspaces.succeed(["python", "-m", "stages.train_ppo", *overrides], self.place, environ)

    def start_ppo(self, *overrides: str, state: Path) -> subprocess.Popen[bytes]:
        """Starts the stage by hand."""
        environ = self.environ | {"RLHF_STATE_DIR": str(state)}
        command = ["python", "-m", "stages.train_ppo", *overrides]
        return subprocess.Popen(command, cwd=self.place, env=environ, stdout=subprocess.DEVNULL)

    def take_results(self) -> dict[str, bytes]:
        """Takes away what the last stage by hand has written to runs/, and returns it."""
        (place,) = (self.place / "runs/train_ppo").iterdir()
        found = workspaces.contents(place)
        shutil.rmtree(place)
        return found


def stages_run(output: str) -> list[str]:
    """The stages that a `dvc repro` ran, in order, by its output."""
    lines = [line for line in output.splitlines() if line.startswith("Running stage '")]
    return [line.split("'")[1] for line in lines]


def readable(file: Path) -> str:
    """All that a file says; Parquet uncompressed, with its metadata."""
    if file.suffix == ".parquet":
        table = pq.read_table(file)
        return f"{pq.read_metadata(file).to_dict()} {table.schema.to_string()} {table.to_pylist()}"
    return file.read_bytes().decode(errors="replace")


def wait_for_iteration(state: Path, child: subprocess.Popen[bytes], wanted: int) -> None:
    """Returns once `child` has saved the iteration `wanted`."""
    deadline = time.monotonic() + workspaces.PATIENCE_SECONDS
    while (saved_iteration(state) or 0) < wanted:
        assert child.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def saved_iteration(state: Path) -> int | None:
    """The last iteration in the training state below `state`; None where there is no state."""
    files = list(state.glob("train_ppo/*/state.safetensors"))
    if not files:
        return None
    with files[0].open("rb") as file:  # safetensors: the length of a JSON header, and the header
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    iteration: int = json.loads(header["__metadata__"]["progress"])["iteration"]
    return iteration
