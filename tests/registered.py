"""Registered versions without a model that could answer, for tests of the gate and of the champion."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from mlflow import MlflowClient

from rlhf import anchors
from rlhf.evaluation.right_answers import RightAnswers
from rlhf.evaluation.statistics import PairedTable
from rlhf.params import Gate
from rlhf.registry import champion
from rlhf.registry.champion import Papers
from rlhf.registry.gate import Candidate
from rlhf.registry.versions import Version

GATE = Gate(min_gain=0, alpha=0.05, champion_alpha=0.05, max_kl=20, max_cut_off=0.1, max_parse_failures=0.1)
PROBLEMS = 100
SFT_RIGHT = 20


def store() -> MlflowClient:
    mlflow.set_tracking_uri(anchors.tracking_uri())  # for logged models' files, which take no client
    return MlflowClient(anchors.tracking_uri())


def add_version(name: str, policy: str) -> Version:
    """Registers the next version of the model `name`, with the files by which it counts as whole."""
    client = store()
    experiment = client.get_experiment_by_name("versions")
    number = experiment.experiment_id if experiment else client.create_experiment("versions", _artifacts())
    model = client.create_logged_model(number, "policy")
    with TemporaryDirectory() as place:
        Path(place, "code").mkdir()
        for file in ("MLmodel", "served_policy.py", "code/library.py"):
            Path(place, file).touch()
        client.log_model_artifacts(model.model_id, place)
    client.finalize_logged_model(model.model_id, "READY")
    if not client.search_registered_models(f"name='{name}'"):
        client.create_registered_model(name)
    tags = {"policy_hash": policy}
    made = client.create_model_version(name, model.model_uri, tags=tags, model_id=model.model_id)
    return Version(name, str(made.version), policy, tags)


def _artifacts() -> str:
    return (anchors.artifact_root() / "versions").as_uri()


def right(count: int, start: int = 0) -> RightAnswers:
    """The first `count` of PROBLEMS problems are right; the problems are numbered from `start`."""
    return {f"{start + number:016x}": number < count for number in range(PROBLEMS)}


def candidate(count: int, start: int = 0, **measured: float) -> Candidate:
    """A policy with `count` right answers, all that its SFT start has among them."""
    both, lost = min(count, SFT_RIGHT), max(0, SFT_RIGHT - count)
    table = PairedTable(both, count - both, lost, PROBLEMS - count - lost)
    numbers: dict[str, Any] = {"kl": 1.0, "cut_off": 0.0, "parse_failures": 0.0} | measured
    return Candidate(table, right(count, start), **numbers)


def papers(policy: Candidate, card: str = "# card\n") -> Papers:
    rows = "".join(f"{problem},{int(is_right)},0\n" for problem, is_right in policy.right.items())
    return Papers(f"problem,strict,flexible\n{rows}", card)


def decide(version: Version, policy: Candidate, gate: Gate = GATE, **changed: Any) -> str:
    """What the gate makes of a version with these numbers; `changed` are params of the gate."""
    return champion.decide(version, policy, papers(policy), gate.model_copy(update=changed), "strict")
