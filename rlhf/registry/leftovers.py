"""What of our experiment's files on this disk nothing registered needs: artifacts of runs, models without a version."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rlhf import anchors
from rlhf.registry.server import server
from rlhf.tracking.server import EXPERIMENT

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run

REMOVED = "artifacts.removed"
"""The tag of a run whose artifacts were given up."""
SETTLED_SECONDS = 24 * 3600
"""A model that is younger may be about to become a version."""
FINAL = ("FINISHED", "FAILED", "KILLED")


@dataclass(frozen=True)
class Leftover:
    """Files that may go."""

    what: str
    path: Path
    since: float
    """When they were last of use, in seconds since the epoch."""
    is_waste: bool
    """Whether somebody has deleted already what they belong to."""
    remove: Callable[[], None]


def leftovers() -> list[Leftover]:
    """The files of our runs and logged models that no version leads to; none where a server keeps the artifacts.

    Runs and models stay in MLflow, their params and metrics too. Raises UserError where the database is out of reach.
    """
    if anchors.is_remote(anchors.tracking_uri()):
        return []
    with server() as store:
        if not (experiment := store.get_experiment_by_name(EXPERIMENT)):
            return []
        versions = store.search_model_versions()
        kept = {value for version in versions for key, value in version.tags.items() if key.endswith("_run_id")}
        kept |= {str(version.run_id) for version in versions}
        models = {version.source.removeprefix("models:/") for version in versions}
        return [
            *_of_runs(store, experiment.experiment_id, kept),
            *_of_models(store, experiment.experiment_id, models),
        ]


def _of_runs(store: MlflowClient, experiment: str, kept: set[str]) -> Iterator[Leftover]:
    from mlflow.entities import ViewType

    for run in _all_pages(partial(store.search_runs, [experiment], run_view_type=ViewType.ALL)):
        path = _local(run.info.artifact_uri)
        if run.info.run_id in kept or run.info.status not in FINAL or not (path and path.is_dir()):
            continue
        is_deleted = run.info.lifecycle_stage == "deleted"
        since = (run.info.end_time or run.info.start_time) / 1000
        what = f"artifacts of run {run.info.run_name}, {run.info.run_id}"
        yield Leftover(what, path, since, is_deleted, partial(_remove_artifacts, run, path, is_deleted))


def _remove_artifacts(run: Run, path: Path, is_deleted: bool) -> None:
    if not is_deleted:  # MLflow lets nobody tag a deleted run
        with server() as store:
            store.set_tag(run.info.run_id, REMOVED, "true")
    shutil.rmtree(path, ignore_errors=True)


def _of_models(store: MlflowClient, experiment: str, registered: set[str]) -> Iterator[Leftover]:
    """Policies that were logged and are no version, for registering was interrupted or the version was deleted."""
    for model in _all_pages(partial(store.search_logged_models, [experiment])):
        path, since = _local(model.artifact_location), model.last_updated_timestamp / 1000
        is_settled = time.time() - since > SETTLED_SECONDS
        if model.name == "policy" and model.model_id not in registered and is_settled and path and path.is_dir():
            what = f"model {model.model_id}, which is no version"
            yield Leftover(what, path, since, True, partial(_remove_model, model, path))


def _remove_model(model: LoggedModel, path: Path) -> None:
    with server() as store:
        store.delete_logged_model(model.model_id)
    shutil.rmtree(path, ignore_errors=True)


def _all_pages(search: Callable[..., Any]) -> Iterator[Any]:
    token = None
    while True:
        page = search(page_token=token)
        yield from page
        if not (token := page.token):
            return


def _local(uri: str) -> Path | None:
    """The directory that an artifact URI names on this disk."""
    parts = urlsplit(uri)
    return Path(url2pathname(parts.path)) if parts.scheme in ("", "file") else None
