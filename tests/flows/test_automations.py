"""The automations' command line and triggers; tests/e2e/test_watching.py has them act on a real server."""

from __future__ import annotations

from datetime import timedelta

import pytest

from flows import automations, servers
from flows.automations import SILENCE_SECONDS, STUCK, _triggers
from tasks.events import GATE_REFUSED


def test_no_address_no_web_address_and_no_server_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "set_prefect_environment", lambda: None)
    for arguments, reason in (
        ([], "name the address"),
        (["hook"], "hook: no address"),
        (["http://x"], "PREFECT_API_URL"),
    ):
        assert automations.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("automations: ") and reason in error and error.count("\n") == 1


def test_a_silence_of_three_heartbeats_is_not_yet_the_end_and_five_minutes_are() -> None:
    assert 3 * servers.HEARTBEAT_SECONDS < SILENCE_SECONDS < 300 - servers.HEARTBEAT_SECONDS


def test_what_each_automation_waits_for() -> None:
    triggers = _triggers(["pipeline"], 210)
    assert set(triggers) == {"failed", "late", STUCK, "refused by the gate"}
    assert triggers["refused by the gate"].expect == {GATE_REFUSED}
    assert triggers["failed"].expect >= {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}
    stuck = triggers[STUCK]
    assert stuck.after == {"prefect.flow-run.heartbeat"} < stuck.expect  # the next one puts the alarm off
    assert stuck.within == timedelta(seconds=210)
    assert "prefect.flow-run.Cancelling" not in stuck.expect  # a flow may die while it is being cancelled
    for trigger in triggers.values():
        assert trigger.for_each == {"prefect.resource.id"}
        assert trigger.match_related.model_dump()["prefect.resource.name"] == ["pipeline"]
