"""The register stage in a workspace of its own, on a real sqlite store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from mlflow import MlflowClient

from rlhf import anchors, config, tracking
from rlhf.config import compose
from rlhf.hashes import dvc_md5
from rlhf.models.checkpoints import checkpoint_hash
from rlhf.stage import run_stage
from stages.register import main
from tests.policies import save_policy

SPLIT = {"sft": {"accuracy": 0.25, "low": 0.1}, "policy": {"accuracy": 0.75}, "gain": 0.5, "gain_low": 0.4, "n": 8}
EVALUATION = {"gate": SPLIT | {"p_value": 1e-9}, "test": SPLIT | {"p_value": 0.002}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture
def workspace(tmp_path, monkeypatch, policy) -> Path:
    monkeypatch.chdir(tmp_path)
    config.write(compose(["scale=smoke", "runtime.device=cpu", f"registry.name=model-{uuid4().hex}"]))
    shutil.copytree(policy, tmp_path / "models/policy")
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/evaluation.json").write_text(json.dumps(EVALUATION))
    (tmp_path / "metrics/ppo.json").write_text('{"best_iteration": 3}')
    return tmp_path


@pytest.fixture
def store() -> MlflowClient:
    return MlflowClient(anchors.tracking_uri())


def model_name() -> str:
    return config.load().registry.name


def contents(store: MlflowClient):
    """Everything that the stage could change on the server."""
    versions = [(v.version, v.tags, v.last_updated_timestamp) for v in store.search_model_versions()]
    experiments = [item.experiment_id for item in store.search_experiments()]
    runs = {run.info.run_id for run in store.search_runs(experiments)}
    models = {model.model_id for model in store.search_logged_models(experiments)}
    return versions, store.get_registered_model(model_name()).aliases, runs, models


def write_lock(workspace: Path, policy_md5: str) -> None:
    deps = {"data/prepared/train.parquet": "d1", "models/sft": "5f7.dir", "rlhf/ppo/trainer.py": "c0de"}
    entry = {
        "cmd": "python -m stages.train_ppo",
        "deps": [{"path": path, "hash": "md5", "md5": md5, "size": 1} for path, md5 in deps.items()],
        "outs": [{"path": "models/policy", "hash": "md5", "md5": policy_md5, "size": 1}],
    }
    lock = {"schema": "2.0", "stages": {"train_ppo": entry, "evaluate": {"cmd": "..."}}}
    (workspace / "dvc.lock").write_text(yaml.safe_dump(lock))


def test_it_registers_once_and_then_leaves_no_trace(workspace, store, capsys):
    run_stage("register", main, [])
    hash_start = checkpoint_hash(workspace / "models/policy")[:12]
    assert f"{model_name()} version 1 (registered, candidate), policy {hash_start}" in capsys.readouterr().out
    before = contents(store)
    run_stage("register", main, [])
    assert f"{model_name()} version 1 (already registered), policy {hash_start}" in capsys.readouterr().out
    assert contents(store) == before


def test_a_candidate_that_is_another_version_is_told(workspace, store, policy, capsys):
    run_stage("register", main, [])
    shutil.rmtree(workspace / "models/policy")
    save_policy(workspace / "models/policy", seed=1)
    run_stage("register", main, [])
    shutil.rmtree(workspace / "models/policy")
    shutil.copytree(policy, workspace / "models/policy")
    capsys.readouterr()
    run_stage("register", main, [])
    assert f"{model_name()} version 1 (already registered; candidate version: 2), policy " in capsys.readouterr().out
    store.delete_registered_model_alias(model_name(), "candidate")
    run_stage("register", main, [])
    assert f"{model_name()} version 1 (already registered; candidate version: none), policy " in capsys.readouterr().out


def test_the_version_tells_scores_and_lineage(workspace, store):
    policy_md5 = dvc_md5(workspace / "models/policy")
    write_lock(workspace, policy_md5)
    with tracking.stage_run("train_ppo", {}) as trained:
        trained.tag_outs({"models/policy": policy_md5})
    with tracking.stage_run("evaluate", {}) as evaluated:
        evaluated.tag_outs({"metrics/evaluation.json": dvc_md5(workspace / "metrics/evaluation.json")})
    run_stage("register", main, [])
    tags = store.get_model_version_by_alias(model_name(), "candidate").tags
    expected = {
        "policy_hash": checkpoint_hash(workspace / "models/policy"),
        "sft_hash": "5f7",
        "source": "tiny:",
        "seed": "0",
        "params.ppo": '{"lr": 0.5}',
        "dvc.data/prepared/train.parquet": "d1",
        "dvc.models/sft": "5f7.dir",
        "train_ppo_run_id": trained.id,
        "evaluate_run_id": evaluated.id,
        "ppo.best_iteration": "3",
        "gate.sft_accuracy": "0.25",
        "gate.policy_accuracy": "0.75",
        "gate.gain": "0.5",
        "gate.gain_low": "0.4",
        "gate.p_value": "1e-09",
        "test.p_value": "0.002",
    }
    assert {key: tags.get(key) for key in expected} == expected
    assert tags["git.commit"] == anchors.git("rev-parse", "HEAD")
    assert "dvc.rlhf/ppo/trainer.py" not in tags


def test_a_lock_that_tells_of_another_policy_is_no_lineage(workspace, store):
    write_lock(workspace, "0ther.dir")
    run_stage("register", main, [])
    tags = store.get_model_version_by_alias(model_name(), "candidate").tags
    assert not [key for key in tags if key.startswith("dvc.")]
    assert tags["sft_hash"] == "5f7"


def failure(capfd) -> str:
    """The one line with which the stage stopped."""
    with pytest.raises(SystemExit) as stopped:
        run_stage("register", main, [])
    assert stopped.value.code == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    return err


def test_a_server_that_is_down_fails_the_stage_with_one_line(workspace, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    line = failure(capfd)
    assert line.startswith("register: MLflow at http://127.0.0.1:9: ")
    assert "Connection refused" in line


@pytest.mark.parametrize(
    ("path", "writer"), [("metrics/evaluation.json", "evaluate"), ("metrics/ppo.json", "train_ppo")]
)
def test_a_missing_input_names_the_stage_to_run(workspace, capfd, path, writer):
    (workspace / path).unlink()
    assert f"{path} is missing: run dvc repro {writer}" in failure(capfd)


@pytest.mark.parametrize(
    ("path", "writer"), [("metrics/evaluation.json", "evaluate"), ("metrics/ppo.json", "train_ppo")]
)
@pytest.mark.parametrize("content", ["", '{"gate": {"sft": ', "{}", "[]"])
def test_a_damaged_input_names_the_stage_to_run(workspace, capfd, path, writer, content):
    (workspace / path).write_text(content)
    line = failure(capfd)
    assert line.startswith(f"register: {path}: not as its stage writes it")
    assert line.endswith(f"run dvc repro {writer}\n")
