"""Asking the registered policy: the champion, or the candidate where there is no champion yet."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlhf import anchors
from rlhf.errors import UserError
from rlhf.registry.champion import CHAMPION
from rlhf.registry.lookup import holder
from rlhf.registry.server import download, has_model, server
from rlhf.registry.versions import CANDIDATE
from rlhf.tracking.server import quiet_mlflow, reason, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

WORKER = Path(__file__).with_name("worker.py")


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
    again = "register it again: make repro stage=register"
    with TemporaryDirectory() as place:
        with server() as registry:
            alias, version = _serving(registry, name)
            label = f"{name} version {version.version}"
            try:
                directory = fetch(name, str(version.version), Path(place))
            except UserError as error:
                raise UserError(f"{error}: {again}") from None
        loaded, *replies = _replies(directory, {"questions": [question], "params": {}})
    if "failed" in loaded:
        raise UserError(f"{label}: {loaded['failed']}: delete this version in MLflow (make ui) and {again}")
    (reply,) = replies
    if "answers" not in reply:
        raise UserError(reply.get("refused") or f"{label}: {reply['failed']}")
    (answer,) = reply["answers"]
    return Answer(answer["text"], f"{label} ({alias})")


def _replies(directory: Path, request: dict[str, Any]) -> list[dict[str, Any]]:
    """What the model in `directory` replies, in a process of its own, after it was loaded and to the request."""
    command, line = worker_command(directory), json.dumps(request) + "\n"
    done = subprocess.run(command, input=line, capture_output=True, text=True)
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    return replies or [{"failed": f"its process ended with exit code {done.returncode}"}]


def worker_command(directory: Path) -> list[str]:
    """The command that answers with the model in `directory`: see `worker`."""
    return [sys.executable, "-P", str(WORKER), str(directory)]


def wanted_version(name: str, alias: str) -> str:
    """The number of the version that has the alias; raises UserError where none has, or no server answers."""
    with server() as registry:
        if version := holder(registry, name, alias):
            return str(version.version)
    raise UserError(f"no version of {name} is {alias}: promote one (make promote), or serve another alias")


def fetch(name: str, number: str, place: Path) -> Path:
    """Copies the files of a version into the empty directory `place`; returns the model's directory.

    Raises UserError where some are gone, or where the server cannot be reached.
    """
    label = f"{name} version {number}"
    mlflow = quiet_mlflow()
    with server() as registry:
        version = registry.get_model_version(name, number)
        if not has_model(version):
            raise UserError(f"{label}: its files are gone")
        try:
            return download(version, "", place)
        except (mlflow.MlflowException, OSError) as error:
            raise UserError(f"{label}: {reason(error)}") from None


def _serving(registry: MlflowClient, name: str) -> tuple[str, ModelVersion]:
    """The alias that serves, and the version that holds it."""
    for alias in (CHAMPION, CANDIDATE):
        if version := holder(registry, name, alias):
            return alias, version
    place = without_password(anchors.tracking_uri())
    raise UserError(f"{place} has no {CHAMPION} and no {CANDIDATE} of {name}: run the pipeline first: make run")
