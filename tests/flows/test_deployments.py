"""prefect.yaml's deployments load, and their parameters are those of their flows."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import CronSchedule

from flows.deployments import POOL, entries, flow_of, full_name, served
from flows.servers import HEARTBEAT_SECONDS
from rlhf.config import compose
from rlhf.errors import UserError


def entry(name: str) -> dict[str, Any]:
    (found,) = [each for each in entries() if full_name(each) == name]
    return found


def test_every_deployment_is_of_a_flow_and_of_the_pool() -> None:
    names = [full_name(each) for each in entries()]
    by_hand = {f"{flow}/by-hand" for flow in ("evaluate_registered", "promote", "rollback")}
    assert set(names) == {"pipeline/nightly", "pipeline/on-demand"} | by_hand
    assert len(names) == len(set(names))
    assert {each["work_pool"]["name"] for each in entries()} == {POOL}


def test_every_run_sends_heartbeats_as_often_as_our_own_workers_runs() -> None:
    for each in entries():
        environ = each["work_pool"]["job_variables"]["env"]
        assert environ["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_SECONDS)


@pytest.mark.parametrize("name", ["pipeline/nightly", "pipeline/on-demand"])
def test_the_parameters_are_the_flows(name: str) -> None:
    flow = flow_of(entry(name))
    choices = flow.validate_parameters(entry(name)["parameters"])["choices"]
    compose(choices.hydra(datetime(2026, 12, 2, tzinfo=UTC)))
    with pytest.raises(Exception, match="scale"):
        flow.validate_parameters({"choices": {"scale": "huge"}})


def test_the_night_has_a_time_zone_and_one_run_at_once() -> None:
    nightly = served(entry("pipeline/nightly"))
    (schedule,) = [each.schedule for each in nightly.schedules or []]
    assert isinstance(schedule, CronSchedule)
    assert (schedule.cron, schedule.timezone) == ("0 2 * * *", "Europe/Berlin")
    assert nightly.concurrency_limit == 1
    assert nightly.concurrency_options is not None
    assert nightly.concurrency_options.collision_strategy == ConcurrencyLimitStrategy.CANCEL_NEW
    assert not served(entry("pipeline/on-demand")).schedules


@pytest.mark.parametrize("name", ["promote/by-hand", "rollback/by-hand"])
def test_a_move_by_hand_wants_a_reason(name: str) -> None:
    schema = flow_of(entry(name)).parameters
    assert "reason" in schema.required
    assert schema.properties["reason"]["minLength"] == 1


def test_a_broken_file_is_told_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "prefect.yaml"
    for content in ("deployments: [", "name: x", "- a list"):
        file.write_text(content)
        with pytest.raises(UserError, match=r"prefect.yaml: cannot be read: "):
            entries(file)
