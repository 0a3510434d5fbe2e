"""Asking the registered policy: the champion, or the candidate where there is no champion yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf import anchors
from rlhf.errors import UserError
from rlhf.registry.champion import CHAMPION
from rlhf.registry.server import has_model, server, version_uri
from rlhf.registry.versions import CANDIDATE
from rlhf.tracking_server import quiet_mlflow, reason, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


@dataclass(frozen=True)
class Answer:
    """What a registered policy says."""

    text: str
    version: str
    """Who says it, in words: "gsm8k-policy version 3 (champion)"."""


def ask_registered(name: str, question: str) -> Answer:
    """The answer of the champion, or of the candidate where there is no champion.

    Raises UserError where there is neither, where its files are gone, or where the question is too long.
    """
    mlflow = quiet_mlflow()
    with server() as registry:
        alias, version = _serving(registry, name)
        label = f"{name} version {version.version}"
        again = "register it again: make repro stage=register"
        if not has_model(version):
            raise UserError(f"{label}: its files are gone: {again}")
        place = mlflow.artifacts.download_artifacts(artifact_uri=version_uri(version))
        try:
            served = mlflow.pyfunc.load_model(place)
        except (mlflow.MlflowException, OSError) as error:
            raise UserError(f"{label}: {reason(error)}: delete this version in MLflow (make ui) and {again}") from None
    try:
        (text,) = served.predict([question])
    except mlflow.MlflowException as error:
        raise UserError(error.message) from None
    return Answer(text, f"{label} ({alias})")


def _serving(registry: MlflowClient, name: str) -> tuple[str, ModelVersion]:
    """The alias that serves, and the version that holds it."""
    from mlflow.exceptions import MlflowException

    for alias in (CHAMPION, CANDIDATE):
        try:
            return alias, registry.get_model_version_by_alias(name, alias)
        except MlflowException as error:
            if error.get_http_status_code() >= 500:
                raise
    place = without_password(anchors.tracking_uri())
    raise UserError(f"{place} has no {CHAMPION} and no {CANDIDATE} of {name}: run the pipeline first: make run")
