"""The MLflow model registry: each policy is one version, known by the hash of its manifest."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rlhf import anchors
from rlhf.errors import UserError
from rlhf.models.checkpoints import checkpoint_hash, verify_files
from rlhf.tracking import Run
from rlhf.tracking_server import client, quiet_mlflow, reason, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models.model import ModelInfo

ALIAS = "candidate"
"""Held by the version that was registered last."""
SERVED_POLICY = Path(__file__).with_name("served_policy.py")
REQUIREMENTS = ("mlflow", "torch", "transformers", "tokenizers", "safetensors", "jinja2", "numpy", "pandas")
"""What loading a registered policy needs, at the lock file's versions."""
UPLOAD_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    name: str
    number: str
    policy_hash: str


def find_version(name: str, directory: Path) -> Version | None:
    """The version of the policy in `directory` that is completely registered and has all its files.

    Raises UserError where the server cannot be reached.
    """
    policy_hash = checkpoint_hash(directory)
    with _server() as registry:
        for found in _search(registry, name, policy_hash):
            if "registered" in found.tags and _is_whole(found, directory):
                return Version(name, str(found.version), policy_hash)
    return None


def register_policy(
    directory: Path,
    *,
    name: str,
    metrics: Mapping[str, float],
    lineage: Mapping[str, object],
    max_new_tokens: int,
    run: Run,
) -> Version:
    """Registers the policy in `directory` as a version of the model `name`, which becomes the candidate.

    A policy that is registered already stays as it is: no second version, and the alias stays where it is. A
    registration that was interrupted is completed; where the files of a version are gone, another one is made.
    `metrics` and `lineage` become the version's tags, `run` its source run, `max_new_tokens` the default length of its
    answers. Raises UserError where the server cannot be reached.
    """
    verify_files(directory)
    policy_hash = checkpoint_hash(directory)
    with _lock(), _server() as registry:
        versions = _search(registry, name, policy_hash)
        found = next((version for version in versions if _is_whole(version, directory)), None)
        if found is None:
            for lost in versions:
                print(f"register: the files of {name} version {lost.version} are gone: registering it anew", flush=True)
            logged = _log_model(registry, directory, metrics, max_new_tokens, run)
            tags = {key: str(value) for key, value in {**lineage, **metrics, "policy_hash": policy_hash}.items()}
            found = _create_version(registry, name, logged, tags)
        if "registered" not in found.tags:
            registry.set_registered_model_alias(name, ALIAS, found.version)
            registry.set_model_version_tag(name, found.version, "registered", "true")
    return Version(name, str(found.version), policy_hash)


def candidate_number(name: str) -> str:
    """The number of the version that is the candidate; empty where there is none."""
    with _server() as registry:
        return str(registry.get_registered_model(name).aliases.get(ALIAS, ""))


def ask_candidate(name: str, question: str) -> str:
    """The registered candidate's answer; raises UserError where there is no candidate or the question is too long."""
    mlflow = quiet_mlflow()
    with _server() as registry:
        try:
            version = registry.get_model_version_by_alias(name, ALIAS)
        except mlflow.MlflowException as error:
            if error.get_http_status_code() >= 500:
                raise
            place = without_password(anchors.tracking_uri())
            raise UserError(f"{place} has no {ALIAS} of {name}: run the pipeline first: make run") from None
        again = "register it again: make repro stage=register"
        if not _has_model(version):
            raise UserError(f"{name} version {version.version}: its files are gone: {again}")
        files = mlflow.artifacts.download_artifacts(artifact_uri=_uri(version))
        try:
            served = mlflow.pyfunc.load_model(files)
        except (mlflow.MlflowException, OSError) as error:
            fault = f"{name} version {version.version}: {reason(error)}"
            raise UserError(f"{fault}: delete this version in MLflow (make ui) and {again}") from None
    try:
        answer: str = served.predict([question])[0]
    except mlflow.MlflowException as error:
        raise UserError(error.message) from None
    return answer


def _log_model(
    registry: MlflowClient, directory: Path, metrics: Mapping[str, float], max_new_tokens: int, run: Run
) -> ModelInfo:
    """Uploads the policy as a logged model of `run`, which is made for it."""
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model, infer_signature

    run.log_metrics(metrics)
    if not run.id:
        raise MlflowException("no run can be made")
    run.flush()
    mlflow.set_experiment(experiment_id=registry.get_run(run.id).info.experiment_id)
    with _patience(), _without_links(directory) as plain:
        return Model.log(
            None,
            flavor=mlflow.pyfunc,
            name="policy",
            run_id=run.id,
            python_model=str(SERVED_POLICY),
            artifacts={"checkpoint": str(plain)},
            signature=infer_signature(["question"], ["answer"], params={"max_new_tokens": max_new_tokens}),
            pip_requirements=_requirements(anchors.CHECKOUT / "requirements.lock"),
        )


def _create_version(registry: MlflowClient, name: str, logged: ModelInfo, tags: dict[str, str]) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    try:
        registry.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return registry.create_model_version(name, logged.model_uri, logged.run_id, tags, model_id=logged.model_id)


def _search(registry: MlflowClient, name: str, policy_hash: str) -> Sequence[ModelVersion]:
    """The versions of that policy: more than one where the files of an earlier one are gone."""
    return registry.search_model_versions(f"name='{name}' and tags.policy_hash='{policy_hash}'")


def _is_whole(version: ModelVersion, directory: Path) -> bool:
    """Whether the version still has the files that it was registered with, those of `directory` by name and size."""
    if not _has_model(version):
        return False
    (checkpoint,) = _files(version, "artifacts") or ("",)
    for folder in {path.parent for path in directory.rglob("*") if path.is_file()}:
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        place = PurePosixPath("artifacts", checkpoint, folder.relative_to(directory))
        if not sizes.items() <= _files(version, str(place)).items():
            return False
    return True


def _has_model(version: ModelVersion) -> bool:
    return {"MLmodel", SERVED_POLICY.name} <= _files(version).keys()


def _files(version: ModelVersion, folder: str = "") -> dict[str, int | None]:
    """Names and sizes in a folder of the version; a directory has no size."""
    import mlflow

    listed = mlflow.artifacts.list_artifacts(artifact_uri=f"{_uri(version)}/{folder}")
    return {PurePosixPath(item.path).name: item.file_size for item in listed}


def _uri(version: ModelVersion) -> str:
    return f"models:/{version.name}/{version.version}"


@contextmanager
def _server() -> Iterator[MlflowClient]:
    """The registry's client; whatever MLflow raises becomes one line."""
    mlflow, uri = quiet_mlflow(), anchors.tracking_uri()
    from sqlalchemy.exc import SQLAlchemyError

    mlflow.set_tracking_uri(uri)  # for logging and loading models, which take no client
    try:
        with warnings.catch_warnings(record=True):  # it asks for type hints, which would cost the signature its params
            yield client(uri)
    except (mlflow.MlflowException, SQLAlchemyError, sqlite3.Error) as error:
        place = without_password(uri)
        raise UserError(f"MLflow at {place}: {reason(error)}: start it, or set MLFLOW_TRACKING_URI") from None


@contextmanager
def _lock() -> Iterator[None]:
    """Held by one process of this machine at a time: finding no version and making one must not interleave."""
    path = anchors.registry_lock()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _without_links(directory: Path) -> Iterator[Path]:
    """`directory`, or a copy of it where its files are links into DVC's cache (cache.type symlink): MLflow refuses."""
    if not any(path.is_symlink() for path in (directory, *directory.rglob("*"))):
        yield directory
        return
    with TemporaryDirectory(dir=anchors.registry_lock().parent) as place:
        yield Path(shutil.copytree(directory, Path(place) / directory.name))


@contextmanager
def _patience() -> Iterator[None]:
    """Lets an upload take its time: the limits for talking about a run are too short for gigabytes."""
    variable = "MLFLOW_HTTP_REQUEST_TIMEOUT"
    before = os.environ[variable]
    os.environ[variable] = str(UPLOAD_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        os.environ[variable] = before


def _requirements(lock: Path) -> list[str]:
    """The lines of REQUIREMENTS in the lock file that hold for this Python, without hashes."""
    from packaging.requirements import Requirement

    lines = lock.read_text(encoding="utf-8").splitlines()
    locked = [Requirement(line.rstrip(" \\")) for line in lines if line[:1].isalnum()]
    return [
        f"{item.name}{item.specifier}"
        for item in locked
        if item.name in REQUIREMENTS and (item.marker is None or item.marker.evaluate())
    ]
