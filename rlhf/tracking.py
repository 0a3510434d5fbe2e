"""MLflow runs of the stages and of the pipeline. A server that is down or slow costs a line of warning, never a stage.

What is logged is queued with the time at which it happened and sent in batches: a point that is sent twice is one
point. What cannot be sent stays in the queue and is tried again, at the latest when the run ends. Artifacts are sent
at once or not at all: they lie on disk anyway.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlhf import anchors, faults
from rlhf.hashes import dvc_md5
from rlhf.tracking_server import NoServer, Server, server

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "gsm8k-rlhf"
PARENT_VARIABLE = "RLHF_PARENT_RUN_ID"
"""The environment variable in which a flow hands the id of its run to the stages."""

SECTIONS = {
    "prepare_data": ("data",),
    "fetch_sft": ("seed", "sft.source", "sft.tiny"),
    "finetune_sft": ("prompt", "runtime", "seed", "sft.finetune"),
    "collect_preferences": ("ppo.sampling.stop", "preferences", "prompt", "runtime", "seed", "verifier"),
    "train_reward": ("evaluation.confidence", "ppo.sampling", "prompt", "reward_model", "runtime", "seed"),
    "train_ppo": ("distributed", "evaluation.batch_size", "ppo", "prompt", "runtime", "seed", "verifier"),
    "evaluate": (
        "evaluation",
        "ppo.micro_batch_size",
        "ppo.sampling.max_new_tokens",
        "ppo.sampling.stop",
        "ppo.sampling.temperature",
        "prompt",
        "runtime",
        "verifier",
    ),
    "register": ("data.hub", "data.source", "gate", "ppo.sampling.max_new_tokens", "registry"),
}
"""The params that a stage depends on in `dvc.yaml`: its run shows them."""

MADE_ON_DEMAND = ("register",)
"""Stages whose run exists only if they ask for its id: registering what is registered leaves no trace."""

FLUSH_SECONDS, FLUSH_POINTS = 5.0, 500
MAX_METRICS, MAX_PARAMS, MAX_VALUE, MAX_DIGEST = 1000, 100, 6000, 36
"""MLflow's limits: metrics and params in a batch, characters of a param and of a data set's digest."""


class Run:
    """A run on the tracking server, made there when something is first sent."""

    def __init__(self, server: Server, name: str, tags: Mapping[str, str], params: Mapping[str, object]) -> None:
        self._server = server
        self._name = name
        self._id = ""
        self._start = self._flushed = _now()
        self._tags = dict(tags)
        self._params: dict[str, str] = {}
        self._points: list[tuple[str, float, int, int]] = []  # key, value, milliseconds since the epoch, step
        self.log_params(params)

    @property
    def is_made(self) -> bool:
        """Whether the server has the run."""
        return bool(self._id)

    @property
    def id(self) -> str:
        """The run's id, for which the run is made; empty as long as the server cannot be reached."""
        if not self._id:
            self.flush()
        return self._id

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Queues one point a key, at this moment; the queue is sent every few seconds."""
        now = _now()
        self._points += [(key, float(value), now, step or 0) for key, value in values.items()]
        if len(self._points) >= FLUSH_POINTS or now - self._flushed > 1000 * FLUSH_SECONDS:
            self.flush()

    def log_params(self, values: Mapping[str, object]) -> None:
        """Queues params under dotted keys; a value longer than MLflow keeps is cut."""
        self._params |= {key: str(value)[:MAX_VALUE] for key, value in flatten(values).items()}

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Queues tags."""
        self._tags |= tags

    def tag_outs(self, outs: Mapping[str, str]) -> None:
        """Tags the run with the hash of each output, by which other runs find it."""
        self.set_tags(_out_tags(outs))

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Sends a file, or a directory with its name, now."""
        self._send(lambda client: client.log_artifact(self._id, str(path), folder or None))

    def log_text(self, text: str, name: str) -> None:
        """Sends `text` as the artifact `name`, now."""
        self._send(lambda client: client.log_text(self._id, text, name))

    def log_dataset(self, path: Path, name: str, context: str, source: Path | None = None) -> None:
        """Links a data file as the run's input; `context` says what it is read for, the digest is its DVC md5.

        `source` is where the file is found later, if that is not `path`.
        """
        digest, place = dvc_md5(path)[:MAX_DIGEST], source or path
        place = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place

        def send(client: MlflowClient) -> None:
            from mlflow.entities import Dataset, DatasetInput, InputTag

            dataset = Dataset(name, digest, source_type="local", source=json.dumps({"uri": str(place)}))
            client.log_inputs(self._id, datasets=[DatasetInput(dataset, [InputTag("mlflow.data.context", context)])])

        self._send(send)

    def flush(self, urgent: bool = False) -> None:
        """Makes the run if it is not there yet and sends the queue; `urgent` tries even a server that just failed."""
        faults.reach("tracking.begun")
        self._flushed = _now()
        if not self._id and not self._server.attempt(self._create, urgent):
            return
        if not self._id:  # refused for good
            return
        while self._points and self._server.attempt(self._send_points, urgent):
            faults.reach("tracking.sent")
            self._points = self._points[MAX_METRICS:]
        while (self._params or self._tags) and self._server.attempt(self._send_entries, urgent):
            self._params = dict(list(self._params.items())[MAX_PARAMS:])
            self._tags = {}
        faults.reach("tracking.ended")

    def close(self, status: str) -> None:
        """Sends the rest of the queue and ends the run with `status`."""
        end = _now()
        self.flush(urgent=True)
        if self._id:
            self._server.attempt(lambda client: client.set_terminated(self._id, status, end))

    def _send(self, call: Callable[[MlflowClient], None]) -> None:
        if self.id:
            self._server.attempt(call)

    def _create(self, client: MlflowClient) -> None:
        experiment = _experiment(client)
        self._id = client.create_run(experiment, self._start, self._tags, self._name).info.run_id
        self._tags = {}

    def _send_points(self, client: MlflowClient) -> None:
        from mlflow.entities import Metric

        client.log_batch(self._id, metrics=[Metric(*point) for point in self._points[:MAX_METRICS]])

    def _send_entries(self, client: MlflowClient) -> None:
        from mlflow.entities import Param, RunTag

        params = [Param(*item) for item in list(self._params.items())[:MAX_PARAMS]]
        client.log_batch(self._id, params=params, tags=[RunTag(*item) for item in self._tags.items()])


@contextmanager
def stage_run(stage: str, params: Mapping[str, object]) -> Iterator[Run]:
    """The run of one stage: a child of the run in $RLHF_PARENT_RUN_ID, if there is one.

    Of the nested `params` it shows those of SECTIONS. It ends as FINISHED, FAILED, or KILLED when interrupted.
    """
    run = Run(_server(), stage, _tags(stage, "stages", os.environ.get(PARENT_VARIABLE, "")), params_of(stage, params))
    if stage not in MADE_ON_DEMAND:
        run.flush()
    with _ended(run, on_demand=stage in MADE_ON_DEMAND):
        yield run


def silent_run() -> Run:
    """A run that sends nothing, for a process that leaves tracking to another."""
    return Run(NoServer(""), "", {}, {})


@contextmanager
def pipeline_run(params: Mapping[str, object], tags: Mapping[str, str]) -> Iterator[Run]:
    """The run of a whole pipeline, whose `id` a flow gives to the stages in $RLHF_PARENT_RUN_ID."""
    run = Run(_server(), "pipeline", _tags("pipeline", "flows") | dict(tags), params)
    run.flush()
    with _ended(run, on_demand=False):
        yield run


def tag_outs(run_id: str, outs: Mapping[str, str]) -> None:
    """Tags the run `run_id` with the hash of each output of its stage (path → md5 as in `dvc.lock`)."""

    def send(client: MlflowClient) -> None:
        from mlflow.entities import RunTag

        client.log_batch(run_id, tags=[RunTag(*item) for item in _out_tags(outs).items()])

    _server().attempt(send)


def find_run_by_outs(stage: str, outs: Mapping[str, str]) -> str | None:
    """The id of the latest run of `stage` that made exactly `outs`; None where there is none or no server."""
    found: list[str] = []

    def search(client: MlflowClient) -> None:
        wanted = {"stage": stage} | _out_tags(outs)
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in wanted.items())
        runs = client.search_runs([_experiment(client)], query, max_results=1, order_by=["attributes.start_time DESC"])
        found.extend(run.info.run_id for run in runs)

    if outs:
        _server().attempt(search)
    return found[0] if found else None


def experiment_id() -> str | None:
    """The id of the experiment that all runs belong to; None where there is no server."""
    found: list[str] = []
    _server().attempt(lambda client: found.append(_experiment(client)))
    return found[0] if found else None


def cached_child(parent: str, stage: str, original_run_id: str | None) -> None:
    """Records under the run `parent` that DVC skipped or restored `stage`, with a link to the run that made it."""

    def send(client: MlflowClient) -> None:
        experiment = _experiment(client)
        tags = _tags(stage, "stages", parent) | {"cached": "true"}
        if original_run_id:
            link = f"[{original_run_id}](#/experiments/{experiment}/runs/{original_run_id})"
            tags |= {"original_run_id": original_run_id, "mlflow.note.content": f"Unchanged: made by run {link}."}
        run = client.create_run(experiment, _now(), tags, stage)
        client.set_terminated(run.info.run_id, "FINISHED")

    if parent:
        _server().attempt(send)


def git_tags() -> dict[str, str]:
    """The commit of the running code, and whether the checkout differs from it; empty without git."""
    commit = anchors.git("rev-parse", "HEAD")
    if not commit:
        return {}
    dirty = anchors.git("status", "--porcelain", "--", ".", ":!dvc.lock", ":!params.yaml") != ""
    return {"mlflow.source.git.commit": commit, "git.dirty": str(dirty).lower()}


def params_of(stage: str, params: Mapping[str, object]) -> dict[str, object]:
    """Those of the nested `params` that `stage` depends on, under dotted keys."""
    flat = flatten(params)
    sections = SECTIONS[stage]
    return {key: value for key, value in flat.items() if any(f"{key}.".startswith(f"{s}.") for s in sections)}


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as one, with dotted keys: {"a": {"b": 1}} gives {"a.b": 1}."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


@contextmanager
def _ended(run: Run, on_demand: bool) -> Iterator[None]:
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        raise
    except Exception as error:
        run.set_tags({"error": str(error).partition("\n")[0]})
        raise
    finally:
        if run.is_made or not on_demand:
            run.close(status)


def _server() -> Server:
    return server(anchors.tracking_uri())


def _tags(name: str, package: str, parent: str = "") -> dict[str, str]:
    source = {"mlflow.source.name": f"python -m {package}.{name}", "mlflow.source.type": "LOCAL"}
    return {"stage": name} | ({"mlflow.parentRunId": parent} if parent else {}) | source | git_tags()


def _experiment(client: MlflowClient) -> str:
    """The experiment's id; it is made if it is missing, with an absolute artifact root where no server has its own."""
    from mlflow.exceptions import MlflowException

    if experiment := client.get_experiment_by_name(EXPERIMENT):
        return experiment.experiment_id
    served = urlsplit(anchors.tracking_uri()).scheme in ("http", "https")
    try:
        return client.create_experiment(EXPERIMENT, None if served else anchors.artifact_root().as_uri())
    except MlflowException:
        if experiment := client.get_experiment_by_name(EXPERIMENT):  # another process was faster
            return experiment.experiment_id
        raise


def _out_tags(outs: Mapping[str, str]) -> dict[str, str]:
    return {f"dvc.out.{path}": md5 for path, md5 in outs.items()}


def _now() -> int:
    return time.time_ns() // 1_000_000
