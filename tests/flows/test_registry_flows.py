"""The registry's flows on a real Prefect server: each is run, and what it leaves there and in MLflow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from pydantic import ValidationError

from flows import servers
from flows.registry_flows import Evaluation, evaluate_registered, promote, rollback
from rlhf import anchors, config, tracking
from rlhf.config import compose
from rlhf.data.gsm8k import Problem, write_prepared
from rlhf.errors import UserError
from rlhf.registry import champion, versions
from tests import registered
from tests.policies import save_policy
from tests.registered import add_version, candidate, decide


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with servers.prefect_api() as wait:
        wait()
        yield


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The model that the params.yaml of a checkout names, in which the flows run."""
    place = tmp_path / "checkout"
    shutil.copytree(anchors.CHECKOUT / "rlhf", place / "rlhf", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "dvc", "init", "--quiet", "--no-scm"], cwd=place, check=True)
    monkeypatch.setattr(anchors, "CHECKOUT", place)
    monkeypatch.setattr(anchors, "main_checkout", lambda: place)
    name = f"model-{uuid4().hex}"
    config.write(compose(["scale=smoke", "runtime.device=cpu", f"registry.name={name}"]), place / "params.yaml")
    return name


def tables(title: str) -> list[dict[str, object]]:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts()
    (data,) = [artifact.data for artifact in found if artifact.key == title]
    assert isinstance(data, str)
    rows: list[dict[str, object]] = json.loads(data)
    return rows


def test_a_version_is_evaluated_again_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    with tracking.stage_run("register", {}) as run:
        policy = save_policy(tmp_path / "policy")
        versions.register_policy(policy, name=name, metrics={}, lineage={}, max_new_tokens=12, run=run)
    problems = [Problem(f"What is {i}?", f"#### {i}", str(i), f"#### {i}", 0, "test") for i in range(3)]
    write_prepared(anchors.CHECKOUT / "data/prepared/gate.parquet", problems)
    evaluate_registered(Evaluation(version="candidate", split="gate"))
    store = registered.store()
    run_id = store.get_model_version(name, "1").tags["evaluated.gate_run_id"]
    metrics = store.get_run(run_id).data.metrics
    assert metrics["gate/n"] == 3
    rows = {row["metric"]: row["value"] for row in tables(f"evaluation-{name}-candidate-gate")}
    assert rows["version"] == f"{name}/1"
    assert rows["gate/policy_accuracy"] == metrics["gate/policy_accuracy"]
    with pytest.raises(UserError, match=rf"^{name} has no version '9': take one of candidate, 1$"):
        evaluate_registered(Evaluation(version="9"))
    with pytest.raises(UserError, match=r"^data/prepared/test.parquet is missing: run dvc repro prepare_data$"):
        evaluate_registered(Evaluation(version="1"))


def test_the_champion_moves_by_hand_and_back(name: str) -> None:
    for policy, right in {"a": 60, "b": 19}.items():
        decide(add_version(name, policy), candidate(right))
    promote(2, "a try")
    store = registered.store()
    assert store.get_registered_model(name).aliases == {"champion": 2, "previous": 1}
    rollback("it failed", model=name)
    assert store.get_registered_model(name).aliases == {"champion": 1, "previous": 2}
    moves = [text.split(" ", 1)[1] for text in champion.moves(store.get_registered_model(name))]
    assert moves[1:] == ["champion 1 -> 2: promoted by hand: a try", "champion 2 -> 1: rolled back by hand: it failed"]
    for wrong, refused in (
        (lambda: promote(9, "why"), "has no version '9'"),
        (lambda: promote(1, "why", model="x"), "no model x"),
    ):
        with pytest.raises(UserError, match=refused):
            wrong()


@pytest.mark.parametrize("flow", [lambda: promote(1, "why"), lambda: rollback("why")])
def test_what_fails_tells_no_secret(name: str, flow: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "s3cret-of-the-store")

    def fail(*_: object) -> str:
        raise RuntimeError(f"log-in with {os.environ['PLANTED_TOKEN']} refused")

    for move in ("promote", "rollback"):
        monkeypatch.setattr(champion, move, fail)
    with pytest.raises(RuntimeError, match=r"^log-in with \*\*\* refused$"):
        flow()
    with get_client(sync_client=True) as client:
        states = [run.state.message or "" for run in client.read_flow_runs() if run.state]
    assert any("log-in with *** refused" in message for message in states)
    assert not any("s3cret" in message for message in states)


def test_nonsense_is_refused_before_anything_runs() -> None:
    for wrong in ({"split": "train"}, {"version": "../x"}, {"version": ""}, {"model": "a/b"}, {"colour": "blue"}):
        with pytest.raises(ValidationError):
            Evaluation.model_validate(wrong)
    schema = evaluate_registered.parameters.model_dump()
    fields = schema["definitions"]["Evaluation"]["properties"]
    assert fields["split"]["enum"] == ["validation", "gate", "test"]
    assert all(field.get("description") or "anyOf" in field for field in fields.values())
