"""The register stage in a workspace of its own, on a real sqlite store."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from mlflow import MlflowClient

from rlhf import anchors, config, tracking
from rlhf.config import compose
from rlhf.hashes import dvc_md5
from rlhf.models.checkpoints import checkpoint_hash, read_manifest, write_manifest
from rlhf.patches import changes
from rlhf.registry import records
from rlhf.stage import run_stage
from stages.register import main
from tests import registered
from tests.policies import PARAMS, save_policy

SPLIT = {
    "n": 8,
    "method": "strict",
    "confidence": 0.95,
    "sft": {"accuracy": 0.25, "low": 0.1, "high": 0.4},
    "policy": {"accuracy": 0.875, "low": 0.7, "high": 1.0},
    "gain": 0.625,
    "gain_low": 0.4,
    "gain_high": 0.8,
    "paired": {"both_right": 2, "gained": 5, "lost": 0, "both_wrong": 1},
    "parse_failures": {"sft": 0.5, "policy": 0.0},
    "cut_off": {"sft": 0.5, "policy": 0.0},
}
EVALUATION = {"gate": SPLIT | {"p_value": 1e-9}, "test": SPLIT | {"p_value": 0.002}}
ANSWERS = "problem,strict,flexible\n" + "".join(f"{number:016x},{int(number < 7)},1\n" for number in range(8))
CURVE = "iteration,kl_sequence\n0,\n1,0\n2,0.5\n3,0.75\n4,1.25\n"
MERITS = "gain on gate +62.5 points, p 0.031"


PPO_METRICS = {"best_iteration": 3, "iterations": 4, "best": {"validation_accuracy": 0.625}}


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
    (tmp_path / "metrics/ppo.json").write_text(json.dumps(PPO_METRICS))
    for path, text in {"plots/ppo.csv": CURVE, "reports/evaluation/gate.csv": ANSWERS}.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
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
    line = f"register: {model_name()} version 1, policy {hash_start}: champion, passed the gate: {MERITS}\n"
    assert capsys.readouterr().out == line
    before = contents(store)
    run_stage("register", main, [])
    assert capsys.readouterr().out == line.replace(": champion", ", registered already: champion")
    assert contents(store) == before


def change(workspace: Path, path: str, old: str, new: str) -> None:
    text = (workspace / path).read_text()
    assert old in text
    (workspace / path).write_text(text.replace(old, new))


def test_a_policy_that_is_no_better_than_the_champion_is_refused_and_stays_candidate(workspace, store, capsys):
    run_stage("register", main, [])
    shutil.rmtree(workspace / "models/policy")
    save_policy(workspace / "models/policy", seed=1)
    capsys.readouterr()
    run_stage("register", main, [])
    reason = "not better than champion version 1: +0.0 points, p 1"
    assert capsys.readouterr().out.endswith(f": refused by the gate: {reason}\n")
    assert store.get_registered_model(model_name()).aliases == {"champion": 1, "candidate": 2}
    version = store.get_model_version(model_name(), "2")
    assert (version.tags["gate"], version.tags["gate.reasons"]) == ("refused", reason)


@pytest.mark.parametrize(
    ("path", "old", "new", "reason"),
    [
        (
            "metrics/evaluation.json",
            '"gained": 5, "lost": 0',
            '"gained": 0, "lost": 1',
            "gain on gate -25.0 points, below 0",
        ),
        (
            "metrics/evaluation.json",
            '"policy": 0.0}, "cut_off"',
            '"policy": 1.0}, "cut_off"',
            "100.0 % of its answers w",
        ),
        ("params.yaml", "max_kl: 20.0", "max_kl: 1.0", "KL 1.2 nats a sequence, above 1"),
        ("params.yaml", "alpha: 0.05", "alpha: 0.01", "gain on gate +62.5 points, not significant: p 0.031"),
    ],
)
def test_what_was_measured_and_the_params_decide(workspace, store, capsys, path, old, new, reason):
    change(workspace, path, old, new)
    run_stage("register", main, [])
    assert f": refused by the gate: {reason}" in capsys.readouterr().out
    assert store.get_registered_model(model_name()).aliases == {"candidate": 1}


def test_the_verifiers_method_decides_which_answers_are_compared(workspace, store, capsys):
    """Strictly 7 of 8 are right, flexibly all: a second policy with the same strict answers has nothing to gain."""
    run_stage("register", main, [])
    shutil.rmtree(workspace / "models/policy")
    save_policy(workspace / "models/policy", seed=1)
    change(workspace, "metrics/evaluation.json", '"method": "strict"', '"method": "flexible"')
    change(workspace, "reports/evaluation/gate.csv", ",0,1", ",1,0")
    run_stage("register", main, [])
    assert "not better than champion version 1: -12.5 points, p 1" in capsys.readouterr().out


def test_the_card_tells_of_the_commit_that_made_the_policy(workspace, store, monkeypatch):
    """Not of the one from which it is looked at again."""
    run_stage("register", main, [])
    before = contents(store)
    card = store.get_model_version(model_name(), "1").description
    assert card.startswith(f"# {model_name()}\n")
    assert f"commit `{anchors.git('rev-parse', 'HEAD')}`" in card
    assert "5f7" in card
    monkeypatch.setattr(tracking, "git_tags", lambda: {"mlflow.source.git.commit": "another"})
    run_stage("register", main, [])
    assert contents(store) == before


def test_the_logged_model_carries_its_metrics_and_names_the_run_that_trained_it(workspace, store):
    policy_md5 = dvc_md5(workspace / "models/policy")
    with tracking.stage_run("train_ppo", {}) as trained:
        trained.tag_outs({"models/policy": policy_md5})
    run_stage("register", main, [])
    source = store.get_model_version_by_alias(model_name(), "candidate").source
    model = store.get_logged_model(source.removeprefix("models:/"))
    metrics = {metric.key: metric.value for metric in model.metrics}
    assert len(metrics) == len(model.metrics)
    shown = {"validation.accuracy": 0.625, "gate.policy_accuracy": 0.875, "test.p_value": 0.002, "kl": 1.25}
    assert {key: metrics.get(key) for key in shown} == shown
    assert model.tags["train_ppo_run_id"] == trained.id
    assert [out.model_id for out in store.get_run(trained.id).outputs.model_outputs] == [model.model_id]


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
        "params.ppo": json.dumps(PARAMS.ppo.model_dump(), sort_keys=True),
        "dvc.data/prepared/train.parquet": "d1",
        "dvc.models/sft": "5f7.dir",
        "train_ppo_run_id": trained.id,
        "evaluate_run_id": evaluated.id,
        "ppo.best_iteration": "3",
        "kl": "1.25",
        "gate.sft_accuracy": "0.25",
        "gate.policy_accuracy": "0.875",
        "gate.gain": "0.625",
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


def records_of(version) -> dict[str, bytes]:
    return records.read(registered.store().get_model_version(version.name, version.version))


def test_the_version_leads_to_lock_params_sft_and_machine(workspace, store):
    start = save_policy(workspace / "models/sft", seed=2)
    manifest = read_manifest(workspace / "models/policy").model_copy(
        update={"parents": {"sft": checkpoint_hash(start)}}
    )
    write_manifest(workspace / "models/policy", manifest)
    policy_md5 = dvc_md5(workspace / "models/policy")
    write_lock(workspace, policy_md5)
    with tracking.stage_run("train_ppo", {}) as trained:
        trained.tag_outs({"models/policy": policy_md5})
        trained.set_tags({"machine.processor": "P"})
    run_stage("register", main, [])
    version = store.get_model_version_by_alias(model_name(), "candidate")
    found = records_of(version)
    diff = changes(anchors.CHECKOUT, records.NEW_CODE)
    expected = {
        "dvc.lock": "dvc.lock",
        "params.yaml": "params.yaml",
        "sft_manifest.json": "models/sft/manifest.json",
        "evaluation.json": "metrics/evaluation.json",
    }
    assert found.pop("changes.diff", b"") == diff
    assert found == {name: (workspace / path).read_bytes() for name, path in expected.items()}
    assert version.tags["machine.processor"] == "P"
    assert version.tags.get("git.diff") == (sha256(diff).hexdigest() if diff else None)


def test_records_of_another_policy_are_left_out(workspace, store):
    save_policy(workspace / "models/sft", seed=2)
    write_lock(workspace, "0ther.dir")
    run_stage("register", main, [])
    version = store.get_model_version_by_alias(model_name(), "candidate")
    assert records_of(version).keys() - {"changes.diff"} == {"params.yaml", "evaluation.json"}


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


INPUTS = {
    "metrics/evaluation.json": "evaluate",
    "metrics/ppo.json": "train_ppo",
    "plots/ppo.csv": "train_ppo",
    "reports/evaluation/gate.csv": "evaluate",
}


@pytest.mark.parametrize(("path", "writer"), INPUTS.items())
def test_a_missing_input_names_the_stage_to_run(workspace, capfd, path, writer):
    (workspace / path).unlink()
    assert f"{path} is missing: run dvc repro {writer}" in failure(capfd)


@pytest.mark.parametrize(("path", "writer"), INPUTS.items())
@pytest.mark.parametrize("content", ["", '{"gate": {"sft": ', "{}", "[]"])
def test_a_damaged_input_names_the_stage_to_run(workspace, capfd, path, writer, content):
    (workspace / path).write_text(content)
    line = failure(capfd)
    assert line.startswith(f"register: {path}: not as its stage writes it")
    assert line.endswith(f"run dvc repro {writer}\n")
