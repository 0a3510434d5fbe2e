"""Moving references in the params are pinned; the hub's part is played by a function."""

from __future__ import annotations

from uuid import uuid4

import pytest

from rlhf import hub
from rlhf.config import compose
from rlhf.errors import UserError
from tasks.references import pin
from tests.registered import add_version, store

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    calls: list[tuple[str, str, str]] = []

    def ask(kind: hub.Kind, repo: str, revision: str) -> str:
        calls.append((kind, repo, revision))
        return COMMIT

    monkeypatch.setattr(hub, "ask", ask)
    return calls


def test_branches_become_commits_and_the_rest_stays(asked: list[tuple[str, str, str]]) -> None:
    raw = compose(["data=gsm8k", "sft.source=hf://org/name"])
    fixed, pins = pin(raw)
    assert asked == [("dataset", "openai/gsm8k", "main"), ("model", "org/name", "main")]
    assert fixed["data"]["hub"]["revision"] == COMMIT
    assert fixed["sft"]["source"] == f"hf://org/name@{COMMIT}"
    assert pins == [f"data.hub openai/gsm8k@main is {COMMIT}", f"sft.source hf://org/name is hf://org/name@{COMMIT}"]
    assert raw["data"]["hub"]["revision"] == "main"
    fixed["data"]["hub"], fixed["sft"] = raw["data"]["hub"], raw["sft"]
    assert fixed == raw


def test_a_preference_set_of_the_hub_is_pinned(asked: list[tuple[str, str, str]]) -> None:
    fixed, pins = pin(compose(["preferences.source=hf://org/pairs@v2"]))
    assert asked == [("dataset", "org/pairs", "v2")]
    assert fixed["preferences"]["source"] == f"hf://org/pairs@{COMMIT}"
    assert pins == [f"preferences.source hf://org/pairs@v2 is hf://org/pairs@{COMMIT}"]


def test_what_does_not_move_asks_nobody(asked: list[tuple[str, str, str]]) -> None:
    for overrides in ([], [f"sft.source=hf://org/name@{COMMIT}", "data=gsm8k", f"data.hub.revision={COMMIT}"]):
        raw = compose(overrides)
        assert pin(raw) == (raw, [])
    assert asked == []


def test_an_alias_becomes_the_version_with_its_hash() -> None:
    name = f"model-{uuid4().hex}"
    for policy in ("f00d", "beef"):
        add_version(name, policy)
    store().set_registered_model_alias(name, "champion", "2")
    source = f"models:/{name}@champion"
    raw = compose([f"sft.source={source}"])
    assert raw["sft"]["reads"] == "conf/nothing"
    fixed, pins = pin(raw)
    assert fixed["sft"]["source"] == f"models:/{name}/2#sha256=beef"
    assert pins == [f"sft.source {source} is models:/{name}/2#sha256=beef"]
    assert pin(fixed) == (fixed, [])
    with pytest.raises(UserError, match=f"^sft.source=models:/{name}/3: {name} has no version '3': take one of"):
        pin(compose([f"sft.source=models:/{name}/3"]))


def test_a_hub_out_of_reach_names_the_param() -> None:
    with pytest.raises(UserError, match=r"^sft.source=hf://org/name@v1: the hub is out of reach .*: name the commit"):
        pin(compose(["sft.source=hf://org/name@v1"]))
