"""Evaluating a registered version again, on a real sqlite store; the engine's place is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import mlflow
import pytest
import yaml

from rlhf import config, tracking
from rlhf.config import compose, validate
from rlhf.data.gsm8k import Problem, write_prepared
from rlhf.data.prompts import encode_response
from rlhf.errors import UserError
from rlhf.evaluation import accuracy
from rlhf.generation.engine import Sample
from rlhf.hashes import dvc_md5
from rlhf.models.checkpoints import checkpoint_hash, load_tokenizer, read_manifest
from rlhf.registry import records, versions
from rlhf.registry.__main__ import main
from rlhf.registry.evaluate import as_trained, evaluate
from rlhf.registry.records import Records
from tests import registered
from tests.policies import save_policy

PARAMS = validate(compose(["scale=smoke", "runtime.device=cpu"]))
SPLIT = "data/prepared/test.parquet"


def problems(count: int = 4) -> list[Problem]:
    """Problems whose right answers are 0, 1, 2, ..."""
    return [Problem(f"{i}?", f"#### {i}", str(i), f"#### {i}", 0, "test") for i in range(count)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("evaluated") / "policy")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("workspace")
    write_prepared(place / SPLIT, problems())
    return place


@pytest.fixture(scope="module")
def version(policy: Path, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> versions.Version:
    """A version that was evaluated on the problems of `workspace`, with 75 % right."""
    with tracking.stage_run("register", {}) as run:
        made = versions.register_policy(
            policy,
            name=f"model-{uuid4().hex}",
            metrics={"test.policy_accuracy": 0.75},
            lineage={},
            max_new_tokens=12,
            run=run,
        )
    lock = {"stages": {"evaluate": {"deps": [{"path": SPLIT, "md5": dvc_md5(workspace / SPLIT)}]}}}
    records.file(made, Records({"dvc.lock": yaml.safe_dump(lock).encode()}, {}))
    return made


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch, policy: Path) -> None:
    """The policy answers 0, 1, 2 and then 0 again: three of four are right."""
    tokenizer = load_tokenizer(policy)

    def generate(model: object, prompts: Sequence[list[int]], **_: Any) -> list[Sample]:
        tokens = [encode_response(tokenizer, f"#### {i % 3}") for i in range(len(prompts))]
        return [Sample(ids, [0.0] * len(ids), True) for ids in tokens]

    monkeypatch.setattr(accuracy, "generate", generate)


def test_the_result_is_a_run_that_leads_to_the_version_and_its_model(version, policy, workspace) -> None:
    done = evaluate(version.name, "candidate", "test", PARAMS, workspace)
    assert done.line == (
        f"{version.name}/1 on test: 75.0 % [30.1, 95.4] right of 4 problems; when it was registered 75.0 %"
    )
    store = registered.store()
    run = store.get_run(done.run_id)
    assert run.info.status == "FINISHED"
    wanted = {"stage": "evaluate_registered", "version": f"{version.name}/1", "split": "test", "data": "own"}
    assert run.data.tags.items() >= (wanted | {"policy_hash": checkpoint_hash(policy)}).items()
    metrics = {"test/policy_accuracy": 0.75, "test/n": 4, "test/strict_policy": 0.75, "test/cut_off_policy": 0.0}
    assert run.data.metrics.items() >= metrics.items()
    assert run.data.metrics == done.metrics
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("test", dvc_md5(workspace / SPLIT))

    recorded = store.get_model_version(version.name, "1")
    assert recorded.tags["evaluated.test_run_id"] == done.run_id
    (model,) = run.inputs.model_inputs
    assert recorded.source == f"models:/{model.model_id}"
    own = {metric.key: metric for metric in store.get_logged_model(model.model_id).metrics}
    accuracy_point = own["test/policy_accuracy"]
    assert (accuracy_point.value, accuracy_point.run_id) == (0.75, done.run_id)
    assert (accuracy_point.dataset_name, accuracy_point.dataset_digest) == ("test", data.dataset.digest)

    mlflow.set_tracking_uri(registered.anchors.tracking_uri())
    table = mlflow.load_table("eval_results_table.json", run_ids=[done.run_id])
    assert list(table["split"]) == ["test"] * 4
    assert list(table["policy_response"]) == ["#### 0", "#### 1", "#### 2", "#### 0"]
    assert list(table["policy_correct"]) == [True, True, True, False]


def test_the_problems_are_the_versions_own_or_are_called_others(version, workspace, tmp_path) -> None:
    write_prepared(tmp_path / SPLIT, problems(3))
    with pytest.raises(UserError, match=f"^{SPLIT}: not the problems of {version.name} version 1 .*--other-data"):
        evaluate(version.name, "1", "test", PARAMS, tmp_path)
    other = evaluate(version.name, "1", "test", PARAMS, tmp_path, other_data=True)
    assert other.line.endswith("[43.9, 100.0] right of 3 problems; not the problems of its run")
    md5 = dvc_md5(workspace / SPLIT)
    kept = tmp_path / "cache" / md5[:2] / md5[2:]
    kept.parent.mkdir(parents=True)
    shutil.copy(workspace / SPLIT, kept)
    own = evaluate(version.name, "1", "test", PARAMS, tmp_path, cache=tmp_path / "cache")
    assert (own.data, own.metrics["test/n"]) == ("own", 4)
    kept.write_bytes(b"torn")
    with pytest.raises(UserError, match="not the problems of"):
        evaluate(version.name, "1", "test", PARAMS, tmp_path, cache=tmp_path / "cache")


def test_a_version_that_kept_no_hashes_is_said_so(policy, workspace) -> None:
    with tracking.stage_run("register", {}) as run:
        name = f"model-{uuid4().hex}"
        versions.register_policy(policy, name=name, metrics={}, lineage={}, max_new_tokens=12, run=run)
    done = evaluate(name, "1", "test", PARAMS, workspace)
    assert (done.data, done.line.rpartition("; ")[2]) == (
        "unknown",
        "it kept no dvc.lock to tell whether these were its problems",
    )


def test_the_policy_answers_as_it_was_trained_to(policy) -> None:
    manifest = read_manifest(policy)
    trained = manifest.params | {
        "verifier": {"method": "flexible"},
        "ppo": {"sampling": {"max_new_tokens": 7, "stop": ["\n"], "temperature": 0.5}},
    }
    prompt = PARAMS.prompt.model_dump() | {"template": "Q: {question}"}
    params = as_trained(PARAMS, manifest.model_copy(update={"params": trained, "prompt": prompt}))
    assert params.verifier.method == "flexible"
    assert params.prompt.template == "Q: {question}"
    assert (params.ppo.sampling.max_new_tokens, params.ppo.sampling.stop) == (7, ["\n"])
    assert params.ppo.sampling.temperature == PARAMS.ppo.sampling.temperature
    assert params.runtime == PARAMS.runtime


def test_the_command_line_says_it_in_a_line_or_as_json(version, workspace, monkeypatch, capsys) -> None:
    monkeypatch.chdir(workspace)
    config.write(compose(["scale=smoke", "runtime.device=cpu", f"registry.name={version.name}"]))
    assert main(["evaluate", "1"]) == 0
    assert "on test: 75.0 % [30.1, 95.4] right of 4 problems" in capsys.readouterr().out.splitlines()[-1]
    assert main(["evaluate", "candidate", "--split", "test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]["test/n"] == 4
    for words, fault in (
        (["9"], f"{version.name} has no version '9': take one of candidate, 1"),
        (["champion"], f"{version.name} has no version 'champion': take one of candidate, 1"),
        (["1", "--split", "gate"], "data/prepared/gate.parquet is missing: run dvc repro prepare_data"),
    ):
        assert main(["evaluate", *words]) == 1
        assert capsys.readouterr().err == f"registry: {fault}\n"
