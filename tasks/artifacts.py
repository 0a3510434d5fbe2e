"""What a person sees of a stage in the Prefect UI beside its log: progress, key metrics, links.

All of it is shown by threads: a Prefect or MLflow server that is slow or gone costs the picture, never the stage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from rlhf import tracking
from rlhf.errors import first_line
from rlhf.stage import read_json
from tasks.summary import run_link

EVERY_SECONDS = 2.0
"""At least so long between two messages about progress."""
BACK_OFF_SECONDS = 30.0
"""And so long after one that did not arrive."""
PATIENCE_SECONDS = 5.0
"""How long the end of a stage waits for its artifacts."""
PROGRESS = re.compile(r"(.+?) [█░]+ (\d+)/(\d+) ?(.*)")

KEY_METRICS = {
    "metrics/data_validation.json": ("splits.*.rows",),
    "metrics/reward_model.json": ("pairs", "pair_accuracy"),
    "metrics/ppo.json": (
        "iterations",
        "best_iteration",
        "initial.validation_accuracy",
        "best.validation_accuracy",
        "final.score",
        "final.kl_sequence",
        "final.cut_off",
    ),
    "metrics/evaluation.json": (
        "*.n",
        "*.sft.accuracy",
        "*.policy.accuracy",
        "*.gain",
        "*.gain_low",
        "*.gain_high",
        "*.p_value",
        "*.cut_off.policy",
        "*.parse_failures.policy",
    ),
}
"""What of a metrics file is worth a look; of a file that is not here, everything."""
PAGES = {
    "prepare_data": ("Data Docs", "data_docs/index.html"),
    "evaluate": ("Report", "evaluation/index.html"),
}
"""The page that a stage leaves among the artifacts of its MLflow run."""


@dataclass(frozen=True)
class Progress:
    """One progress line of a stage."""

    percent: float
    text: str
    """The line without its bar."""


def parse_progress(line: str) -> Progress | None:
    """What a line with a bar says, as rlhf/runtime.py prints it: `train_ppo ██░░ 3/12 41s score 0.4`."""
    if not (match := PROGRESS.fullmatch(line)):
        return None
    label, done, total, rest = match[1], int(match[2]), int(match[3]), match[4]
    return Progress(100 * done / max(total, 1), f"{label} {done}/{total} {rest}".rstrip())


class ProgressArtifact:
    """The newest progress of a stage as an artifact that moves."""

    def __init__(self, stage: str) -> None:
        self._key = f"progress-{slug(stage)}"
        self._newest: Progress | None = None
        self._changed, self._ended = Event(), Event()
        self._thread: Thread | None = None
        self._artifact: UUID | None = None

    def show(self, line: str) -> None:
        """Takes note of a stage's line and returns at once."""
        if is_watched() and (progress := parse_progress(line)):
            self._newest = progress
            self._changed.set()
            self._thread = self._thread or _start(self._send_on)

    def close(self) -> None:
        """Has the last state sent, and waits for that a little."""
        self._ended.set()
        self._changed.set()
        if self._thread:
            self._thread.join(PATIENCE_SECONDS)

    def _send_on(self) -> None:
        sent: Progress | None = None
        while not (self._ended.is_set() and sent == self._newest):
            self._changed.wait()
            self._changed.clear()
            arrived = True
            if (newest := self._newest) and newest != sent:
                sent = newest
                arrived = _attempt(partial(self._send, newest))
            self._ended.wait(EVERY_SECONDS if arrived else BACK_OFF_SECONDS)

    def _send(self, progress: Progress) -> None:
        if self._artifact is None:
            self._artifact = cast("UUID", create_progress_artifact(progress.percent, self._key, progress.text))
        else:
            update_progress_artifact(self._artifact, progress.percent, progress.text)


def show_results(stage: str, metrics: list[str], workspace: Path, outs: Mapping[str, str]) -> None:
    """A table of the stage's key metrics and links to its MLflow run and to the page that it made."""
    if not is_watched():
        return

    def show() -> None:
        if rows := [row for path in metrics for row in key_metrics(workspace, path)]:
            create_table_artifact(rows, f"metrics-{slug(stage)}", f"Key metrics of {stage}: {', '.join(metrics)}")
        if run_id := tracking.find_run_by_outs(stage, outs):
            create_link_artifact(run_link(run_id), f"MLflow run {run_id}", f"mlflow-{slug(stage)}")
            if page := PAGES.get(stage):
                title, path = page
                create_link_artifact(run_link(run_id, path), title, slug(title))

    _start(lambda: _attempt(show)).join(PATIENCE_SECONDS)


def key_metrics(workspace: Path, path: str) -> Iterator[dict[str, Any]]:
    """The rows of the table: the numbers of a metrics file that are worth a look, in its order."""
    numbers = read_json(workspace, path, tracking.flatten)
    wanted = KEY_METRICS.get(path, ("*",))
    for key, value in numbers.items():
        if not isinstance(value, (bool, str)) and any(fnmatch(key, pattern) for pattern in wanted):
            yield {"metric": key, "value": value}


def is_watched() -> bool:
    """Whether this is a task run, which a server keeps artifacts for."""
    return TaskRunContext.get() is not None


def slug(name: str) -> str:
    """A name as Prefect wants the keys of artifacts."""
    return re.sub("[^a-z0-9]+", "-", name.lower())


def _start(work: Callable[[], object]) -> Thread:
    """Does `work` in a thread that knows the task run and keeps no process alive."""
    thread = Thread(target=copy_context().run, args=(work,), daemon=True)
    thread.start()
    return thread


def _attempt(call: Callable[[], None]) -> bool:
    """Whether `call` came through; a failure is a line in the log."""
    try:
        call()
    except Exception as error:  # of any kind: clients let those of their transports through
        get_run_logger().warning(f"not shown in the Prefect UI: {first_line(error)}")
        return False
    return True
