"""Runs as the server has them afterwards, on a real sqlite store; and without a server."""

from __future__ import annotations

import time
from contextlib import suppress
from uuid import uuid4

import mlflow
import pytest
import yaml
from mlflow import MlflowClient

from rlhf import anchors, tracking
from rlhf.hashes import dvc_md5
from rlhf.tracking.delivery import MAX_ENTRIES, MAX_METRICS
from rlhf.tracking.runs import MAX_VALUE

PARAMS = {"seed": 3, "ppo": {"lr": 1e-3, "kl": {"coef": 0.02}}, "registry": {"name": "mine"}}
DOWN = "http://user:secret@127.0.0.1:9"
"""Nothing listens on the discard port."""


@pytest.fixture
def store() -> MlflowClient:
    return MlflowClient(anchors.tracking_uri())


def runs_named(store: MlflowClient, key: str, value: str):
    experiment = store.get_experiment_by_name(tracking.EXPERIMENT)
    return store.search_runs([experiment.experiment_id], f"tags.`{key}` = '{value}'") if experiment else []


def test_a_stage_is_a_child_of_the_pipeline_with_its_own_params(store, monkeypatch):
    with tracking.pipeline_run({"scale": "tiny"}, {"reward": "verifier"}) as parent:
        monkeypatch.setenv("RLHF_PARENT_RUN_KEY", parent.key)
        with tracking.stage_run("train_ppo", PARAMS) as run:
            assert store.get_run(run.id).info.status == "RUNNING"
    pipeline, stage = store.get_run(parent.id), store.get_run(run.id)
    assert stage.data.tags["mlflow.parentRunId"] == parent.id
    assert (stage.info.run_name, stage.info.status, stage.data.tags["stage"]) == ("train_ppo", "FINISHED", "train_ppo")
    assert stage.data.params == {"seed": "3", "ppo.lr": "0.001", "ppo.kl.coef": "0.02"}
    assert (pipeline.info.status, pipeline.data.params) == ("FINISHED", {"scale": "tiny"})
    assert pipeline.data.tags["reward"] == "verifier"
    assert "mlflow.parentRunId" not in pipeline.data.tags


def test_without_a_flow_a_stage_has_no_parent(store):
    with tracking.stage_run("train_ppo", PARAMS) as run:
        pass
    assert "mlflow.parentRunId" not in store.get_run(run.id).data.tags


def test_artifacts_and_data_sets_lie_with_the_run(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table, folder = tmp_path / "data.parquet", tmp_path / "docs"
    table.write_bytes(b"rows")
    folder.mkdir()
    (folder / "index.html").write_text("<html>")
    with tracking.stage_run("evaluate", {}) as run:
        run.log_artifact(table, "tables")
        run.log_artifact(folder)
        run.log_text("a sample", "samples/first.txt")
        run.log_dataset(table, "test", "evaluation")
        run.log_dataset(table, "made", "test", source=tmp_path / "data/prepared/test.parquet")
    paths = {item.path for folder in ("tables", "docs", "samples") for item in store.list_artifacts(run.id, folder)}
    assert paths == {"tables/data.parquet", "docs/index.html", "samples/first.txt"}
    found = {item.dataset.name: item for item in store.get_run(run.id).inputs.dataset_inputs}
    given, made = found["test"], found["made"]
    assert made.dataset.digest == dvc_md5(table)
    assert made.dataset.source == '{"uri": "data/prepared/test.parquet"}'
    assert (given.dataset.name, given.dataset.digest) == ("test", dvc_md5(table))
    assert given.dataset.source == '{"uri": "data.parquet"}'
    assert [(tag.key, tag.value) for tag in given.tags] == [("mlflow.data.context", "evaluation")]


def test_a_table_is_one_of_mlflows(store):
    mlflow.set_tracking_uri(anchors.tracking_uri())  # which `load_table` asks, whatever its client's
    with tracking.stage_run("evaluate", {}) as run:
        run.log_table(["question", "correct"], [["1 + 1 = ?", False], ["“2” + 2?", True]], "results.json")
    table = store.load_table(store.get_run(run.id).info.experiment_id, "results.json", [run.id])
    assert table.to_dict("list") == {"question": ["1 + 1 = ?", "“2” + 2?"], "correct": [False, True]}


def test_every_point_arrives_once_with_its_step_and_moment(store):
    before = time.time_ns() // 1_000_000
    with tracking.stage_run("train_ppo", {}) as run:
        for step in range(2 * MAX_METRICS + 1):
            run.log_metrics({"kl": step / 8}, step)
        run.log_metrics({"best": 0.5})
    after = time.time_ns() // 1_000_000
    history = store.get_metric_history(run.id, "kl")
    assert [(point.step, point.value) for point in history] == [(n, n / 8) for n in range(2 * MAX_METRICS + 1)]
    assert all(before <= point.timestamp <= after for point in history)
    assert store.get_run(run.id).data.metrics["best"] == 0.5


def test_more_params_than_a_batch_holds_and_longer_than_a_value_may_be(store):
    with tracking.pipeline_run({f"key{n}": n for n in range(MAX_ENTRIES + 5)}, {}) as run:
        run.log_params({"prompt": {"system": "x" * (MAX_VALUE + 1)}})
    params = store.get_run(run.id).data.params
    assert len(params) == MAX_ENTRIES + 6
    assert params["prompt.system"] == "x" * MAX_VALUE


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("no\nsecond line"), "FAILED"), (KeyboardInterrupt(), "KILLED")]
)
def test_the_run_says_how_the_stage_ended(store, error, status):
    with pytest.raises(type(error)), tracking.stage_run("train_ppo", {}) as run:
        raise error
    recorded = store.get_run(run.id)
    assert recorded.info.status == status
    assert recorded.data.tags.get("error") == ("no" if status == "FAILED" else None)


def test_a_run_is_found_by_all_of_its_outs_and_its_stage():
    policy, metrics = f"{uuid4().hex}.dir", uuid4().hex
    outs = {"models/policy": policy, "metrics/ppo.json": metrics}
    with tracking.stage_run("train_ppo", {}) as first:
        first.tag_outs(outs)
    with tracking.stage_run("train_ppo", {}):
        pass
    assert tracking.find_run_by_outs("train_ppo", outs) == first.id
    assert tracking.find_run_by_outs("train_ppo", {"models/policy": policy}) == first.id
    assert tracking.find_run_by_outs("train_ppo", outs | {"metrics/ppo.json": "0"}) is None
    assert tracking.find_run_by_outs("evaluate", outs) is None
    assert tracking.find_run_by_outs("train_ppo", {}) is None


def test_a_stage_that_dvc_skipped_links_to_the_run_that_made_it(store):
    outs = {"models/fetched": uuid4().hex}
    with tracking.pipeline_run({}, {}) as parent:
        with tracking.stage_run("fetch_sft", {}) as made:
            made.tag_outs(outs)
        tracking.cached_child(parent.key, "fetch_sft", outs)
        tracking.cached_child(parent.key, "finetune_sft", {})
    children = {run.data.tags["stage"]: run for run in runs_named(store, "mlflow.parentRunId", parent.id)}
    assert {run.info.status for run in children.values()} == {"FINISHED"}
    assert {run.data.tags["cached"] for run in children.values()} == {"true"}
    assert children["fetch_sft"].data.tags["original_run_id"] == made.id
    assert f"/runs/{made.id})" in children["fetch_sft"].data.tags["mlflow.note.content"]
    assert "original_run_id" not in children["finetune_sft"].data.tags


def test_register_leaves_no_run_unless_it_asks_for_one(store):
    with tracking.pipeline_run({}, {}) as parent, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_PARENT_RUN_KEY", parent.key)
        with tracking.stage_run("register", PARAMS) as run:
            run.tag_outs({})
        assert runs_named(store, "mlflow.parentRunId", parent.id) == []
        with tracking.stage_run("register", PARAMS) as run:
            assert run.id
        (made,) = runs_named(store, "mlflow.parentRunId", parent.id)
    assert (made.info.run_id, made.info.status) == (run.id, "FINISHED")


def test_a_server_that_is_down_costs_one_line_a_run(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DOWN)
    monkeypatch.setenv("RLHF_JOURNAL_DIR", str(tmp_path / "journal"))
    (tmp_path / "file").touch()
    with tracking.pipeline_run({}, {}) as parent:
        with tracking.stage_run("train_ppo", PARAMS) as run:
            run.log_metrics({"kl": 1.0}, 1)
            run.log_text("text", "text.txt")
            run.log_artifact(tmp_path / "file")
            run.tag_outs({"models/policy": "0"})
            assert run.id == ""
        tracking.cached_child(parent.key, "evaluate", {})
    out, err = capfd.readouterr()
    assert out == ""
    of_stage, of_pipeline = err.splitlines()
    assert of_stage.startswith(
        "tracking: http://user:***@127.0.0.1:9 cannot be reached ([Errno 111] Connection refused)"
    )
    assert f"this run is kept in {tmp_path / 'journal' / run.key}: " in of_stage
    assert "python -m rlhf.tracking flush" in of_stage
    assert f"2 journals in {tmp_path / 'journal'}" in of_pipeline
    assert "secret" not in err
    assert "secret" not in "".join(path.read_text() for path in tmp_path.rglob("*.json*"))


def test_a_run_that_nobody_can_look_up_is_none_and_one_line(monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DOWN)
    assert tracking.find_run_by_outs("train_ppo", {"models/policy": "0"}) is None
    assert capfd.readouterr().err.count("\n") == 1


def test_a_resumed_stage_continues_its_run(store, tmp_path, monkeypatch):
    """The first process fails, its journal is delivered and gone; the second logs one step again, and one more."""
    with suppress(ValueError), tracking.stage_run("train_ppo", PARAMS) as first:
        first.resume(tmp_path / "run")
        first.log_metrics({"kl": 0.5}, 1)
        raise ValueError("no")
    assert store.get_run(first.id).info.status == "FAILED"
    first_time = store.get_metric_history(first.id, "kl")[0].timestamp
    time.sleep(0.01)
    with tracking.pipeline_run({}, {}) as parent:
        monkeypatch.setenv("RLHF_PARENT_RUN_KEY", parent.key)
        with tracking.stage_run("train_ppo", PARAMS) as second:
            second.resume(tmp_path / "run")
            assert second.flush()
            assert (second.key, second.id) == (first.key, first.id)
            assert store.get_run(first.id).info.status == "RUNNING"
            second.log_metrics({"kl": 0.5}, 1)
            second.log_metrics({"kl": 0.25}, 2)
    recorded = store.get_run(first.id)
    history = store.get_metric_history(first.id, "kl")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.25)]
    assert history[0].timestamp == first_time
    assert recorded.info.status == "FINISHED"
    assert "error" not in recorded.data.tags
    assert recorded.data.tags["mlflow.parentRunId"] == parent.id
    assert len(runs_named(store, "rlhf.key", first.key)) == 1


def test_a_key_that_was_half_written_is_no_key(tmp_path):
    (tmp_path / "run").write_text("train_ppo-")
    with tracking.stage_run("train_ppo", {}) as run:
        run.resume(tmp_path / "run")
    assert (tmp_path / "run").read_text() == run.key


def test_a_silent_run_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("RLHF_JOURNAL_DIR", str(tmp_path / "journal"))
    run = tracking.SilentRun()
    run.resume(tmp_path / "run")
    run.log_metrics({"kl": 1.0}, 1)
    run.log_text("text", "text.txt")
    run.log_artifact(tmp_path / "missing")
    run.log_dataset(tmp_path / "missing", "train", "training")
    assert list(tmp_path.iterdir()) == []


def test_a_run_shows_the_params_that_its_stage_depends_on():
    stages = yaml.safe_load((anchors.CHECKOUT / "dvc.yaml").read_text())["stages"]
    assert {name: sorted(sections) for name, sections in tracking.SECTIONS.items()} == {
        name: sorted(stage["params"]) for name, stage in stages.items()
    }


def test_flatten():
    assert tracking.flatten({"a": {"b": 1, "c": {"d": None}}, "e": [1]}) == {"a.b": 1, "a.c.d": None, "e": [1]}
