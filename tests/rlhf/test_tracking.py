"""Runs as the server has them afterwards, on a real sqlite store; and servers that fail."""

from __future__ import annotations

import time
from uuid import uuid4

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from rlhf import anchors, tracking, tracking_server
from rlhf.hashes import dvc_md5
from rlhf.tracking_server import Server

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
        monkeypatch.setenv("RLHF_PARENT_RUN_ID", parent.id)
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


def test_every_point_arrives_once_with_its_step_and_moment(store):
    before = time.time_ns() // 1_000_000
    with tracking.stage_run("train_ppo", {}) as run:
        for step in range(2 * tracking.MAX_METRICS + 1):
            run.log_metrics({"kl": step / 8}, step)
        run.log_metrics({"best": 0.5})
    after = time.time_ns() // 1_000_000
    history = store.get_metric_history(run.id, "kl")
    assert [(point.step, point.value) for point in history] == [(n, n / 8) for n in range(2 * tracking.MAX_METRICS + 1)]
    assert all(before <= point.timestamp <= after for point in history)
    assert store.get_run(run.id).data.metrics["best"] == 0.5


def test_more_params_than_a_batch_holds_and_longer_than_a_value_may_be(store):
    with tracking.pipeline_run({f"key{n}": n for n in range(tracking.MAX_PARAMS + 5)}, {}) as run:
        run.log_params({"prompt": {"system": "x" * (tracking.MAX_VALUE + 1)}})
    params = store.get_run(run.id).data.params
    assert len(params) == tracking.MAX_PARAMS + 6
    assert params["prompt.system"] == "x" * tracking.MAX_VALUE


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
    with tracking.stage_run("train_ppo", {}) as other:
        pass
    assert tracking.find_run_by_outs("train_ppo", outs) == first.id
    assert tracking.find_run_by_outs("train_ppo", {"models/policy": policy}) == first.id
    assert tracking.find_run_by_outs("train_ppo", outs | {"metrics/ppo.json": "0"}) is None
    assert tracking.find_run_by_outs("evaluate", outs) is None
    assert tracking.find_run_by_outs("train_ppo", {}) is None
    tracking.tag_outs(other.id, {"plots/ppo.csv": policy})
    assert tracking.find_run_by_outs("train_ppo", {"plots/ppo.csv": policy}) == other.id


def test_a_stage_that_dvc_skipped_links_to_the_run_that_made_it(store):
    with tracking.pipeline_run({}, {}) as parent:
        tracking.cached_child(parent.id, "fetch_sft", "made-by")
        tracking.cached_child(parent.id, "finetune_sft", None)
    children = {run.data.tags["stage"]: run for run in runs_named(store, "mlflow.parentRunId", parent.id)}
    assert {run.info.status for run in children.values()} == {"FINISHED"}
    assert {run.data.tags["cached"] for run in children.values()} == {"true"}
    assert children["fetch_sft"].data.tags["original_run_id"] == "made-by"
    assert "/runs/made-by)" in children["fetch_sft"].data.tags["mlflow.note.content"]
    assert "original_run_id" not in children["finetune_sft"].data.tags


def test_register_leaves_no_run_unless_it_asks_for_one(store):
    with tracking.pipeline_run({}, {}) as parent, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_PARENT_RUN_ID", parent.id)
        with tracking.stage_run("register", PARAMS) as run:
            run.tag_outs({})
        assert runs_named(store, "mlflow.parentRunId", parent.id) == []
        with tracking.stage_run("register", PARAMS) as run:
            assert run.id
        (made,) = runs_named(store, "mlflow.parentRunId", parent.id)
    assert (made.info.run_id, made.info.status) == (run.id, "FINISHED")


def test_a_server_that_is_down_costs_one_line(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DOWN)
    with tracking.pipeline_run({}, {}) as parent, tracking.stage_run("train_ppo", PARAMS) as run:
        run.log_metrics({"kl": 1.0}, 1)
        run.log_text("text", "text.txt")
        run.log_artifact(tmp_path)
        run.tag_outs({"models/policy": "0"})
        assert tracking.find_run_by_outs("train_ppo", {"models/policy": "0"}) is None
        tracking.cached_child(parent.id, "evaluate", None)
    assert (parent.id, run.id) == ("", "")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "http://user:***@127.0.0.1:9 cannot be reached" in err
    assert "Connection refused" in err
    assert "secret" not in err


class Outage(Server):
    """The real server, which fails the first `failures` calls."""

    def __init__(self, failures: int) -> None:
        super().__init__(anchors.tracking_uri())
        self.failures, self.calls = failures, 0

    def attempt(self, call, urgent=False):
        def call_or_fail(client):
            self.calls += 1
            if self.calls <= self.failures:
                raise MlflowException("down")  # HTTP 500
            call(client)

        return super().attempt(call_or_fail, urgent)


def test_a_server_that_comes_back_gets_every_point_with_its_first_moment(store):
    server = Outage(failures=1)
    run = tracking.Run(server, "train_ppo", {"stage": "train_ppo"}, {"lr": 1})
    run.log_metrics({"kl": 1.0}, 1)
    logged = time.time_ns() // 1_000_000
    run.flush()
    assert server.calls == 1
    run.flush()
    assert server.calls == 1, "a server that just failed is left alone"
    time.sleep(0.01)
    run.close("FINISHED")
    recorded = store.get_run(run.id)
    (point,) = store.get_metric_history(run.id, "kl")
    assert point.timestamp <= logged
    assert recorded.info.start_time <= logged < recorded.info.end_time
    assert (recorded.data.params, recorded.info.status) == ({"lr": "1"}, "FINISHED")


def test_an_outage_in_the_middle_loses_and_doubles_nothing(store, monkeypatch):
    monkeypatch.setattr(tracking_server, "PAUSE_SECONDS", 0.0)
    run = tracking.Run(Outage(failures=0), "train_ppo", {}, {})
    run.flush()
    run._server = Outage(failures=2)
    for step in range(3):
        run.log_metrics({"kl": float(step)}, step)
        run.flush()
    run.close("FINISHED")
    assert [point.step for point in store.get_metric_history(run.id, "kl")] == [0, 1, 2]


def test_what_the_server_refuses_is_dropped_and_said(store, capfd):
    run = tracking.Run(Server(anchors.tracking_uri()), "train_ppo", {}, {"lr": 1})
    run.flush()
    run.log_params({"lr": 2})  # params are immutable
    run.log_metrics({"kl": 1.0}, 1)
    run.close("FINISHED")
    recorded = store.get_run(run.id)
    assert (recorded.data.params, recorded.data.metrics) == ({"lr": "1"}, {"kl": 1.0})
    assert recorded.info.status == "FINISHED"
    assert "refused an entry" in capfd.readouterr().err


def test_a_run_shows_the_params_that_its_stage_depends_on():
    stages = yaml.safe_load((anchors.CHECKOUT / "dvc.yaml").read_text())["stages"]
    assert {name: sorted(sections) for name, sections in tracking.SECTIONS.items()} == {
        name: sorted(stage["params"]) for name, stage in stages.items()
    }


def test_flatten():
    assert tracking.flatten({"a": {"b": 1, "c": {"d": None}}, "e": [1]}) == {"a.b": 1, "a.c.d": None, "e": [1]}
