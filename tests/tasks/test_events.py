"""Which of register's last lines is a refusal to tell of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tasks import events
from tasks.events import GATE_REFUSED, announce_refusal

VERSION = "register: gsm8k-policy version 2, policy 97c1632f0a74"


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str], dict[str, str]]]:
    calls: list[tuple[str, dict[str, str], dict[str, str]]] = []
    monkeypatch.setattr(events, "flow_run", SimpleNamespace(id="1", name="red-fox"))
    monkeypatch.setattr(events, "emit_event", lambda name, resource, payload: calls.append((name, resource, payload)))
    return calls


def test_a_new_refusal_is_an_event_of_the_flow_run(emitted: list[tuple[str, dict[str, str], dict[str, str]]]) -> None:
    assert announce_refusal(f"{VERSION}: refused by the gate: gain on gate +0.0 points")
    resource = {"prefect.resource.id": "prefect.flow-run.1", "prefect.resource.name": "red-fox"}
    line = "gsm8k-policy version 2, policy 97c1632f0a74: refused by the gate: gain on gate +0.0 points"
    assert emitted == [(GATE_REFUSED, resource, {"registered": line})]


@pytest.mark.parametrize(
    "standing", [": champion, passed the gate: +3.1", ", registered already: refused by the gate: x"]
)
def test_champions_and_old_refusals_are_none(emitted: list[object], standing: str) -> None:
    assert not announce_refusal(VERSION + standing)
    assert emitted == []


def test_without_a_flow_run_nothing_is_emitted(emitted: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "flow_run", SimpleNamespace(id=None, name=None))
    assert not announce_refusal(f"{VERSION}: refused by the gate: x")
    assert emitted == []
