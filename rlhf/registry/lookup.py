"""Finding a version of a registered model by number or alias, and its checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from rlhf.errors import UserError
from rlhf.registry.server import download, files, has_model, patience, server

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

URI = re.compile(r"models:/(?P<name>[^/@#]+)(?:@(?P<alias>[^/@#]+)|/(?P<number>\d+))")
"""How MLflow names a version."""
SOURCE_VARIABLE = "RLHF_SOURCE_REGISTRY"
"""The tracking server that has the checkpoint which `sft.source` names, where it is not that of the runs."""


def find_model(registry: MlflowClient, name: str) -> RegisteredModel:
    """The registered model; raises UserError where nothing is registered under that name."""
    from mlflow.exceptions import MlflowException

    try:
        return registry.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise UserError(f"no model {name} is registered: run the pipeline first: make run") from None


def holder(registry: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """The version that has the alias; None where none has. Raises UserError where there is no such model."""
    number = find_model(registry, name).aliases.get(alias)
    return registry.get_model_version(name, str(number)) if number else None


def find(registry: MlflowClient, name: str, wanted: str) -> ModelVersion:
    """The version with the number or alias `wanted`; raises UserError that lists those that there are."""
    return find_of(registry, find_model(registry, name), wanted)


def find_of(registry: MlflowClient, model: RegisteredModel, wanted: str) -> ModelVersion:
    """`find` of a model that was found already."""
    versions = {str(version.version): version for version in registry.search_model_versions(f"name='{model.name}'")}
    number = wanted if wanted in versions else str(model.aliases.get(wanted, ""))
    if number not in versions:
        known = ", ".join([*sorted(model.aliases), *sorted(versions, key=int)])
        raise UserError(f"{model.name} has no version {wanted!r}: take one of {known or 'none'}")
    return registry.get_model_version(model.name, number)


def require_files(version: ModelVersion) -> None:
    """Raises UserError where the version has lost what MLflow needs to load it."""
    if not has_model(version):
        raise UserError(f"{version.name} version {version.version}: its files are gone: take another version")


def checkpoint_path(version: ModelVersion) -> PurePosixPath:
    """Where the checkpoint lies in the version; `artifacts` itself where it is gone."""
    return PurePosixPath("artifacts", *files(version, "artifacts"))


def fetch_checkpoint(version: ModelVersion, place: Path) -> Path:
    """A copy of the version's checkpoint below the empty directory `place`; raises UserError where files are gone."""
    require_files(version)
    return download(version, str(checkpoint_path(version)), place)


def fetch_source(name: str, wanted: str, place: Path) -> Path:
    """`fetch_checkpoint` of the version with that number or alias, for a run that starts from it."""
    with server(os.environ.get(SOURCE_VARIABLE, "")) as registry:
        return fetch_checkpoint(find(registry, name, wanted), place)


def fetch_run(run: str, path: str, place: Path) -> Path:
    """A copy of the run's artifact `path`, a file or a directory, below the empty directory `place`.

    Raises UserError where there is no such run or artifact.
    """
    import mlflow

    with server(os.environ.get(SOURCE_VARIABLE, "")) as registry:
        artifacts = f"{registry.get_run(run).info.artifact_uri}/{path}"
        parent = path.rpartition("/")[0]
        if path not in {item.path for item in registry.list_artifacts(run, parent or None)}:
            raise UserError(f"run {run} has no artifact {path}: look at its artifacts in MLflow")
        with patience():
            return Path(mlflow.artifacts.download_artifacts(artifact_uri=artifacts, dst_path=str(place)))


def pinned(source: str) -> str:
    """The URI of a version as number and hash of its policy, whatever alias or number it had.

    Raises UserError where there is no such version, or the server cannot be reached.
    """
    match = URI.fullmatch(source)
    if match is None:  # with a hash already, or malformed: fetching says so
        return source
    with server() as registry:
        version = find(registry, match["name"], match["alias"] or match["number"])
    if not (digest := version.tags.get("policy_hash")):
        raise UserError(f"version {version.version} is no policy of this pipeline: take one that register made")
    return f"models:/{version.name}/{version.version}#sha256={digest}"
