"""The pipeline as an operation: what Prefect's server and MLflow's, on PostgreSQL, know of a scheduled run."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from mlflow.entities import Run

from flows.parameters import Choices
from flows.servers import HEARTBEAT_SECONDS
from rlhf import config
from tasks.dvc_stages import upstream
from tests.e2e import workspaces
from tests.e2e.operation import CHOICES, ITERATIONS, MODEL, OVERRIDES, REASON, Operation
from tests.e2e.servers import wait_until
from tests.e2e.test_pipeline import STAGES

pytestmark = pytest.mark.servers

UNCHANGED = set(STAGES) - {"register"}
"""What DVC need not run again for the same params."""
ENDLESS = 100_000
"""So many iterations that nobody waits for their end."""


def test_prefect_scheduled_the_night_itself_and_it_completed(operation: Operation) -> None:
    run = operation.client.read_flow_run(operation.night)
    assert (run.state_type, run.state_name, run.auto_scheduled) == ("COMPLETED", "Completed", True)
    assert run.created_by is not None and run.created_by.type == "SCHEDULE"
    assert run.deployment_id == operation.deployment("pipeline/nightly").id
    assert run.state is not None
    assert str(run.state.message).startswith(f"registered: {MODEL} version 1, policy ")
    assert " refused by the gate: gain on gate " in str(run.state.message)
    assert Choices.model_validate(run.parameters["choices"]) == Choices.model_validate(CHOICES)


def test_the_next_nights_are_scheduled_at_two_in_the_time_zone(operation: Operation) -> None:
    assert operation.night
    nights = operation.nights_to_come()
    times = [night.expected_start_time.astimezone(ZoneInfo("Europe/Berlin")) for night in nights]
    assert {(time.hour, time.minute) for time in times} == {(2, 0)}
    assert len({time.date() for time in times}) == len(times)
    assert all(night.auto_scheduled for night in nights)


def test_each_stage_was_a_task_that_waited_for_those_that_it_reads(operation: Operation) -> None:
    tasks = operation.tasks(operation.night)
    (other,) = set(tasks) - set(STAGES)
    assert other.startswith("pin references")
    assert {str(task.state_name) for task in tasks.values()} == {"Completed"}
    names = {task.id: name for name, task in tasks.items()}
    raw = config.compose(Choices.model_validate(CHOICES).hydra(operation.client.read_flow_run(operation.night).created))
    for stage, needed in upstream(operation.place / "dvc.yaml", raw).items():
        waited = {names[one.id] for one in tasks[stage].task_inputs.get("wait_for", []) if one.input_type == "task_run"}
        assert waited == set(needed), stage


def test_each_task_has_the_lines_of_its_stage(operation: Operation) -> None:
    assert operation.says(operation.night, "train_ppo: best validation accuracy ", "train_ppo")
    assert "█" in operation.says(operation.night, f" {ITERATIONS}/{ITERATIONS} ", "train_ppo")
    assert operation.says(operation.night, "refused by the gate", "register")
    commit = workspaces.succeed(["git", "rev-parse", "HEAD"], operation.place, dict(os.environ)).strip()
    assert operation.says(operation.night, f"commit {commit} in ")
    assert not [line for line in operation.log(operation.night) if line.startswith("[transformers]")]


def test_the_stages_artifacts_are_whole(operation: Operation) -> None:
    artifacts = operation.artifacts(operation.night)
    progress = {key: float(one.data) for key, one in artifacts.items() if one.type == "progress"}
    assert progress["progress-train-ppo"] == progress["progress-finetune-sft"] == progress["progress-evaluate"] == 100
    children = operation.children(operation.night)
    rows = json.loads(artifacts["metrics-evaluate"].data)
    logged = children["evaluate"].data.metrics
    assert {"test.gain", "gate.p_value", "test.policy.accuracy"} <= {row["metric"] for row in rows}
    for row in rows:
        split, _, name = row["metric"].partition(".")
        assert logged[f"{split}/{name.replace('.', '_')}"] == row["value"], row
    assert "pipeline-summary" in artifacts


def test_the_links_lead_to_the_stages_runs(operation: Operation) -> None:
    artifacts, children = operation.artifacts(operation.night), operation.children(operation.night)
    for stage in UNCHANGED:
        link = artifacts[f"mlflow-{stage.replace('_', '-')}"].data
        assert f"{operation.servers.mlflow}/#/runs/{children[stage].info.run_id}" in link
    for key, stage, path in (
        ("report", "evaluate", "evaluation/index.html"),
        ("data-docs", "prepare_data", "data_docs/index.html"),
    ):
        run = children[stage].info
        place = f"{operation.servers.mlflow}/#/experiments/{run.experiment_id}/runs/{run.run_id}/artifacts/{path}"
        assert place in artifacts[key].data
        folder = path.partition("/")[0]
        assert path in {file.path for file in operation.mlflow.list_artifacts(run.run_id, folder)}


def test_the_flow_said_that_it_is_alive(operation: Operation) -> None:
    """As often as prefect.yaml has it, which the automation for stuck runs counts on."""
    question = {
        "filter": {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{operation.night}"]},
        }
    }
    wanted = operation.client.read_flow_run(operation.night).total_run_time.total_seconds() // HEARTBEAT_SECONDS

    def found() -> int:
        return len(operation.client.request("POST", "/events/filter", json=question).json()["events"])

    wait_until(lambda: found() >= wanted, f"{wanted:.0f} heartbeats")


# --- MLflow


def test_each_flow_run_has_a_run_with_a_child_a_stage(operation: Operation) -> None:
    for run, stages in (
        (operation.night, set(STAGES)),
        (operation.morning, UNCHANGED),
    ):  # none to register in the morning
        assert operation.pipeline(run).info.status == "FINISHED"
        children = operation.children(run)
        assert set(children) == stages
        assert {child.info.status for child in children.values()} == {"FINISHED"}


def test_the_morning_found_nothing_new_and_its_children_lead_to_the_nights(operation: Operation) -> None:
    assert operation.state(operation.morning).name == "Nothing new"
    night, morning = operation.children(operation.night), operation.children(operation.morning)
    assert {run.data.tags.get("cached") for run in morning.values()} == {"true"}
    assert not any(run.data.metrics for run in morning.values())  # the points stay with who made them
    assert not any("cached" in run.data.tags for run in night.values())
    for stage in UNCHANGED:
        assert morning[stage].data.tags["original_run_id"] == night[stage].info.run_id


def test_every_point_is_there_once(operation: Operation) -> None:
    children = operation.children(operation.night)

    def steps(run: Run, key: str) -> list[int]:
        return [point.step for point in operation.mlflow.get_metric_history(run.info.run_id, key)]

    assert steps(children["train_ppo"], "score") == list(range(1, ITERATIONS + 1))
    assert steps(children["train_ppo"], "validation_accuracy") == list(range(ITERATIONS + 1))
    assert steps(children["finetune_sft"], "loss") == list(range(1, 301))
    parent = operation.pipeline(operation.night)
    assert parent.data.metrics["test/policy_accuracy"] == children["evaluate"].data.metrics["test/policy_accuracy"]
    for run in (parent, *children.values()):
        for key in run.data.metrics:
            assert set(Counter(steps(run, key)).values()) == {1}, (run.info.run_name, key)


def test_the_policy_is_one_version_whose_files_are_on_the_server(operation: Operation) -> None:
    assert operation.morning
    (version,) = operation.mlflow.search_model_versions(f"name='{MODEL}'")
    children = operation.children(operation.night)
    assert version.run_id == children["register"].info.run_id
    assert version.tags["train_ppo_run_id"] == children["train_ppo"].info.run_id
    assert version.tags["git.commit"] == children["register"].data.tags["mlflow.source.git.commit"]
    assert version.tags["registered"] == "true"
    state = operation.state(operation.night)
    assert f" version 1, policy {version.tags['policy_hash'][:12]}: " in str(state.message)
    assert version.tags["gate"] == "refused"
    assert ", below 100" in version.tags["gate.reasons"]
    assert "## Limits" in version.description
    assert list(operation.servers.artifacts.rglob("value_head.safetensors"))
    assert not (operation.place / "mlartifacts").exists()


def test_the_logged_model_carries_its_metrics(operation: Operation) -> None:
    evaluate = operation.children(operation.night)["evaluate"]
    (model,) = operation.mlflow.search_logged_models([evaluate.info.experiment_id])
    metrics = {metric.key: metric.value for metric in model.metrics}
    assert metrics["test.policy_accuracy"] == evaluate.data.metrics["test/policy_accuracy"] > 0
    assert {"gate.gain", "kl", "validation.accuracy"} <= set(metrics)
    assert model.tags["train_ppo_run_id"] == operation.children(operation.night)["train_ppo"].info.run_id


def test_the_evaluation_has_a_row_a_problem(operation: Operation) -> None:
    run = operation.children(operation.night)["evaluate"]
    place = operation.mlflow.download_artifacts(run.info.run_id, "eval_results_table.json")
    table = json.loads(Path(place).read_text(encoding="utf-8"))
    splits = Counter(row[table["columns"].index("split")] for row in table["data"])
    assert splits == {"gate": 16, "test": 24}


def test_a_person_makes_it_champion_from_the_form(operation: Operation) -> None:
    assert operation.state(operation.promotion).is_completed()
    model = operation.mlflow.get_registered_model(MODEL)
    assert {name: str(number) for name, number in model.aliases.items()} == {"candidate": "1", "champion": "1"}
    (move,) = [text for key, text in model.tags.items() if key.startswith("move.")]
    assert move.endswith(f" champion none -> 1: promoted by hand: {REASON}")


# --- stopped half-way


def test_a_cancelled_run_goes_on_in_the_next_ones_workspace(operation: Operation) -> None:
    assert operation.night  # whose first stages these runs take from the cache
    overrides = [word for word in OVERRIDES if not word.startswith("ppo.iterations=")]
    choices = CHOICES | {"overrides": [*overrides, f"ppo.iterations={ENDLESS}"]}
    first = operation.start("pipeline/on-demand", choices=choices)
    operation.says(first, f"/{ENDLESS} ")
    assert operation.cancel(first).is_cancelled()
    second = operation.start("pipeline/on-demand", choices=choices)
    done = int(operation.says(second, "resumed after iteration ").rpartition(" ")[2])
    assert done >= 1
    operation.says(second, f"/{ENDLESS} ")
    assert operation.cancel(second).is_cancelled()

    run = operation.children(second)["train_ppo"]  # one run, which has moved on to the second pipeline's
    assert "train_ppo" not in operation.children(first)
    steps = [point.step for point in operation.mlflow.get_metric_history(run.info.run_id, "score")]
    assert sorted(steps) == list(range(1, len(steps) + 1))  # each iteration once, in one run
    assert len(steps) > done
