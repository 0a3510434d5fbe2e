"""The registry's server: its client, its errors in one line, who may change it now, and the files of a version."""

from __future__ import annotations

import os
import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from rlhf import anchors, locks
from rlhf.errors import UserError
from rlhf.tracking.server import client, quiet_mlflow, reason, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

LOCK_VARIABLE = "RLHF_REGISTRY_LOCK"
"""A `postgresql://` URI whose advisory locks several hosts share, where the tracking server itself is behind HTTP."""
SERVED_POLICY = Path(__file__).with_name("served_policy.py")
LIBRARY = anchors.CHECKOUT / "rlhf"
"""What SERVED_POLICY imports, which goes with each version."""
UPLOAD_TIMEOUT_SECONDS = 600


@contextmanager
def server(uri: str = "") -> Iterator[MlflowClient]:
    """The client of the registry at `uri`, or else of our own; whatever MLflow raises becomes one line."""
    mlflow, uri = quiet_mlflow(), uri or anchors.tracking_uri()
    from sqlalchemy.exc import SQLAlchemyError

    mlflow.set_tracking_uri(uri)  # for logging and loading models, which take no client
    try:
        with warnings.catch_warnings(record=True):  # it asks for type hints, which would cost the signature its params
            yield client(uri)
    except (mlflow.MlflowException, SQLAlchemyError, sqlite3.Error, ImportError) as error:  # a database's driver
        place = without_password(uri)
        raise UserError(f"MLflow at {place}: {reason(error)}: start it, or set MLFLOW_TRACKING_URI") from None


def lock(purpose: Literal["register", "move"], name: str) -> AbstractContextManager[None]:
    """Held by one process at a time that registers a version of the model `name`, or that moves its aliases.

    Between the processes of this host; between hosts where PostgreSQL keeps the lock: MLflow's own database, or that of
    RLHF_REGISTRY_LOCK. Raises UserError where that is no PostgreSQL, or is out of reach.
    """
    given = os.environ.get(LOCK_VARIABLE, "")
    uri = given or anchors.tracking_uri()
    doing = {"register": "registers a version", "move": "moves the champion"}[purpose] + f" of {name}"
    if uri.startswith("postgresql"):
        return locks.advisory(uri, f"gsm8k-rlhf {purpose} {name}", doing)
    if given:
        raise UserError(f"{LOCK_VARIABLE}={without_password(given)}: no PostgreSQL: write postgresql://user@host/base")
    path = anchors.registry_lock()
    return locks.in_turn(path.with_stem(f"{path.stem}-{purpose}"), doing)


@contextmanager
def lock_all(purpose: Literal["register", "move"], names: Sequence[str]) -> Iterator[None]:
    """Holds `lock` for all of these models at once."""
    by_name = (os.environ.get(LOCK_VARIABLE) or anchors.tracking_uri()).startswith("postgresql")
    with ExitStack() as held:
        for name in names if by_name else names[:1]:  # one file serves for all names
            held.enter_context(lock(purpose, name))
        yield


def model_names() -> list[str]:
    """The registered models by name."""
    with server() as registry:
        return sorted(model.name for model in registry.search_registered_models())


def artifact_stores() -> list[str]:
    """Where experiments keep artifacts that are no files of this host: `s3://bucket`, `mlflow-artifacts:`."""
    from mlflow.entities import ViewType

    with server() as registry:
        places = [urlsplit(found.artifact_location) for found in registry.search_experiments(view_type=ViewType.ALL)]
    stores = {f"{place.scheme}:{place.netloc and f'//{place.netloc}'}" for place in places if place.scheme}
    return sorted(stores - {"file:"})


def version_uri(version: ModelVersion, path: str = "") -> str:
    """The URI of a version of a registered model, or of a file in it."""
    return f"models:/{version.name}/{version.version}" + (f"/{path}" if path else "")


def files(version: ModelVersion, folder: str = "") -> dict[str, int | None]:
    """Names and sizes in a folder of the version; a directory has no size."""
    import mlflow

    listed = mlflow.artifacts.list_artifacts(artifact_uri=version_uri(version, folder))
    return {PurePosixPath(item.path).name: item.file_size for item in listed}


def upload(registry: MlflowClient, version: ModelVersion, path: str, content: bytes) -> None:
    """Puts a file into the version, beside its model."""
    with TemporaryDirectory() as place, patience():
        file = Path(place, PurePosixPath(path).name)
        file.write_bytes(content)
        folder = "/".join(PurePosixPath(path).parts[:-1])
        model_id = version.source.removeprefix("models:/")  # MLflow keeps no other trace of it
        registry.log_model_artifact(model_id, str(file), folder or None)


def download(version: ModelVersion, path: str, place: Path) -> Path:
    """A copy of a file or folder of the version, below `place`."""
    import mlflow

    with patience():
        return Path(mlflow.artifacts.download_artifacts(artifact_uri=version_uri(version, path), dst_path=str(place)))


def has_model(version: ModelVersion) -> bool:
    """Whether the version still has what MLflow needs to load it, the checkpoint apart."""
    return {"MLmodel", SERVED_POLICY.name, "code"} <= files(version).keys()


@contextmanager
def patience() -> Iterator[None]:
    """Lets an upload take its time: the limits for talking about a run are too short for gigabytes."""
    variable = "MLFLOW_HTTP_REQUEST_TIMEOUT"
    before = os.environ[variable]
    os.environ[variable] = str(UPLOAD_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        os.environ[variable] = before


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for a moment, on a disk that has room for models."""
    place = anchors.registry_lock().parent
    place.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place) as made:
        yield Path(made)
