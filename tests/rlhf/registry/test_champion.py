"""Who is champion afterwards, and what the registry tells of it, on a real sqlite store."""

from __future__ import annotations

import re
import select
import subprocess
import sys
from uuid import uuid4

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from rlhf import anchors
from rlhf.errors import UserError
from rlhf.registry import champion
from rlhf.registry.server import download
from tests import postgres, registered
from tests.registered import add_version, candidate, decide


@pytest.fixture
def name() -> str:
    """A registered model of the test's own."""
    return f"model-{uuid4().hex}"


@pytest.fixture
def store() -> MlflowClient:
    return registered.store()


def aliases(store: MlflowClient, name: str) -> dict[str, str]:
    return {alias: str(number) for alias, number in store.get_registered_model(name).aliases.items()}


def moves(store: MlflowClient, name: str) -> list[str]:
    """The recorded moves without their times."""
    found = champion.moves(store.get_registered_model(name))
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 ", text) for text in found)
    return [text.split(" ", 1)[1] for text in found]


def tags(store: MlflowClient, name: str, number: str) -> dict[str, str]:
    return dict(store.get_model_version(name, number).tags)


def contents(store: MlflowClient, name: str) -> list[object]:
    model = store.get_registered_model(name)
    versions = store.search_model_versions(f"name='{name}'")
    return [model.aliases, model.tags, *((v.version, v.tags, v.last_updated_timestamp) for v in versions)]


def reign(name: str, *rights: int) -> None:
    """Registers one version after the other, each with that many right answers, and lets the gate decide."""
    for policy, count in enumerate(rights):
        decide(add_version(name, f"policy {policy}"), candidate(count))


# --- the gate decides


def test_the_first_that_passes_is_champion(store, name):
    version = add_version(name, "a")
    assert decide(version, candidate(60)) == "champion, passed the gate: gain on gate +40.0 points, p 9.1e-13"
    assert aliases(store, name) == {"champion": "1"}
    found = tags(store, name, "1")
    assert found["gate"] == "passed"
    assert found["gate.reasons"] == "gain on gate +40.0 points, p 9.1e-13"
    assert found["gate.champion"] == "none"
    assert moves(store, name) == ["champion none -> 1: passed the gate: gain on gate +40.0 points, p 9.1e-13"]


def test_a_refused_version_carries_the_reasons(store, name):
    version = add_version(name, "a")
    assert decide(version, candidate(19)) == "refused by the gate: gain on gate -1.0 points, below 0"
    assert aliases(store, name) == {}
    found = tags(store, name, "1")
    assert (found["gate"], found["gate.reasons"]) == ("refused", "gain on gate -1.0 points, below 0")
    assert moves(store, name) == []


def test_a_better_one_replaces_the_champion_which_becomes_previous(store, name):
    reign(name, 60, 80)
    assert aliases(store, name) == {"champion": "2", "previous": "1"}
    assert tags(store, name, "2")["gate.champion"] == "1"
    reign(name, 99)
    assert aliases(store, name) == {"champion": "3", "previous": "2"}


def test_one_that_is_not_better_leaves_the_champion(store, name):
    reign(name, 60, 64)
    assert aliases(store, name) == {"champion": "1"}
    reason = "not better than champion version 1: +4.0 points, p 0.062, above 0.05"
    assert tags(store, name, "2")["gate.reasons"] == reason


def test_the_same_evidence_is_judged_once(store, name):
    version = add_version(name, "a")
    first = decide(version, candidate(60))
    before = contents(store, name)
    assert decide(version, candidate(60)) == first
    assert contents(store, name) == before


def test_a_replaced_champion_does_not_come_back_by_itself(store, name):
    version = add_version(name, "a")
    decide(version, candidate(60))
    decide(add_version(name, "b"), candidate(80))
    assert decide(version, candidate(60)) == "no longer champion: that is version 2"
    assert aliases(store, name) == {"champion": "2", "previous": "1"}


def test_uncommitted_changes_make_no_champion_until_they_are_committed(name: str) -> None:
    version, policy = add_version(name, "a"), candidate(60)
    evidence = (version, policy, registered.papers(policy), registered.GATE, "strict")
    refused = "refused by the gate: made from uncommitted changes: commit them and run again"
    assert champion.decide(*evidence, uncommitted=True) == refused
    assert champion.decide(*evidence).startswith("champion, passed the gate")
    assert champion.decide(*evidence, uncommitted=True).startswith("champion, passed the gate")


def test_other_rules_are_a_reason_to_judge_again(store, name):
    version = add_version(name, "a")
    assert decide(version, candidate(60, kl=5), max_kl=3).startswith("refused by the gate: KL 5.0 nats")
    assert decide(version, candidate(60, kl=5), max_kl=None).startswith("champion, passed the gate")
    assert tags(store, name, "1")["gate"] == "passed"


def test_the_reigning_champion_is_not_judged_again(store, name):
    version = add_version(name, "a")
    decide(version, candidate(60))
    assert decide(version, candidate(60), max_kl=0.5).startswith("champion, ")
    assert aliases(store, name) == {"champion": "1"}


def test_a_champion_whose_files_were_lost_is_replaced_by_the_same_policy(store, name):
    reign(name, 60)
    again = add_version(name, "policy 0")
    assert decide(again, candidate(60)).startswith("champion, passed the gate")
    assert aliases(store, name) == {"champion": "2"}


def test_a_champion_whose_answers_are_gone_stays(store, name):
    reign(name, 60)
    path = tags(store, name, "1")["gate.answers"]
    place = store.get_model_version_download_uri(name, "1").removeprefix("file://")
    answers = anchors.Path(place, path)
    answers.write_text(answers.read_text().replace(",1,", ",0,"))
    better = add_version(name, "b")
    assert "nothing to compare with champion version 1" in decide(better, candidate(99))
    answers.unlink()
    assert "nothing to compare with champion version 1" in decide(better, candidate(98))
    assert aliases(store, name) == {"champion": "1"}


def test_a_decision_that_was_cut_short_is_completed(store, name, monkeypatch):
    reign(name, 60)
    version = add_version(name, "b")
    set_alias = MlflowClient.set_registered_model_alias

    def fail(self, model, alias, number):
        if alias == "champion":
            raise MlflowException("the connection broke")
        set_alias(self, model, alias, number)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_alias", fail)
        with pytest.raises(UserError, match="the connection broke"):
            decide(version, candidate(80))
    assert decide(version, candidate(80)).startswith("champion, passed the gate")
    assert aliases(store, name) == {"champion": "2", "previous": "1"}


def test_a_version_has_its_card_as_description_and_as_file(store, name, tmp_path):
    version = add_version(name, "a")
    decide(version, candidate(60))
    recorded = store.get_model_version(name, "1")
    assert recorded.description == "# card\n"
    place = anchors.Path(store.get_model_version_download_uri(name, "1").removeprefix("file://"))
    assert (place / "README.md").read_text() == "# card\n"
    assert (place / recorded.tags["gate.answers"]).read_text() == registered.papers(candidate(60)).answers
    gate = registered.GATE
    champion.decide(version, candidate(60), registered.papers(candidate(60), "# another\n"), gate, "strict")
    assert store.get_model_version(name, "1").description == (place / "README.md").read_text() == "# another\n"


# --- two at once

KNOCKING = """
import sys
from rlhf.registry import gate
from tests.registered import add_version, candidate, decide

judge = gate.judge
def deliberate(*arguments):
    print("judging", flush=True)
    sys.stdin.readline()
    return judge(*arguments)
gate.judge = deliberate

name, policy, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
version = add_version(name, policy)
print("knocking", flush=True)
sys.stdin.readline()
decide(version, candidate(count))
"""
PATIENCE_SECONDS = 1.0
"""How long a second candidate has to show that no lock keeps it; one that waits for the lock shows nothing at all."""


class Knocker:
    """A process with a candidate, which stops before it knocks and again while it has read the champion."""

    def __init__(self, name: str, count: int) -> None:
        command = [sys.executable, "-c", KNOCKING, name, f"policy {count}", str(count)]
        self.process = subprocess.Popen(
            command, cwd=anchors.CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def line(self) -> str:
        return self.process.stdout.readline().decode().strip()

    def is_silent(self) -> bool:
        return not select.select([self.process.stdout], [], [], PATIENCE_SECONDS)[0]

    def go_on(self) -> None:
        self.process.stdin.write(b"\n")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def locked_by_postgresql(monkeypatch):
    with postgres.running() as uri:
        monkeypatch.setenv("RLHF_REGISTRY_LOCK", uri)
        yield


@pytest.mark.parametrize("counts", [(60, 80), (80, 60)], ids=["better one second", "better one first"])
def test_of_two_that_knock_at_once_the_better_one_ends_as_champion(store, name, counts):
    race(store, name, counts)


@pytest.mark.usefixtures("locked_by_postgresql")
def test_two_that_knock_from_different_hosts_are_kept_apart_by_postgresql(store, name):
    race(store, name, (60, 80))


def race(store, name, counts):
    """Two processes, the second of which knocks while the first has read who is champion and not decided yet."""
    knockers = [Knocker(name, counts[0])]
    try:
        assert knockers[0].line() == "knocking"
        knockers.append(Knocker(name, counts[1]))
        first, second = knockers
        assert second.line() == "knocking"
        first.go_on()
        assert first.line() == "judging"
        second.go_on()
        assert second.is_silent()
        first.go_on()
        assert second.line() == "judging"
        second.go_on()
        assert [knocker.process.wait() for knocker in knockers] == [0, 0]
    finally:
        for knocker in knockers:
            knocker.end()
    better = str(1 + counts.index(80))
    assert aliases(store, name)["champion"] == better
    assert tags(store, name, "2")["gate.champion"] == "1"


# --- by hand


def test_rollback_swaps_champion_and_previous_and_withdraws(store, name):
    reign(name, 60, 80)
    assert champion.rollback(name, "answers  in\nFrench") == f"{name} version 1 is champion; previous: 2, withdrawn"
    assert aliases(store, name) == {"champion": "1", "previous": "2"}
    assert tags(store, name, "2")["withdrawn"] == "answers in French"
    assert moves(store, name)[-1] == "champion 2 -> 1: rolled back by hand: answers in French"


def test_a_withdrawn_version_stays_out_until_it_is_promoted(store, name):
    reign(name, 60)
    version = add_version(name, "b")
    decide(version, candidate(80))
    champion.rollback(name, "too long")
    assert decide(version, candidate(80)) == "withdrawn by hand: too long"
    assert decide(version, candidate(80), max_kl=5) == "withdrawn by hand: too long"
    assert aliases(store, name) == {"champion": "1", "previous": "2"}
    assert champion.promote(name, "2", "shorter now") == f"{name} version 2 is champion; previous: 1"
    assert "withdrawn" not in tags(store, name, "2")
    assert decide(version, candidate(80), max_kl=5) == "champion, promoted by hand: shorter now"


def test_a_rollback_can_be_rolled_back(store, name):
    reign(name, 60, 80)
    champion.rollback(name, "a mistake")
    champion.rollback(name, "it was none")
    assert aliases(store, name) == {"champion": "2", "previous": "1"}
    assert "withdrawn" not in tags(store, name, "2")


@pytest.mark.parametrize("rights", [(19,), (60,)], ids=["no champion", "no previous one"])
def test_where_there_is_nothing_to_go_back_to_it_says_so(store, name, rights):
    reign(name, *rights)
    with pytest.raises(UserError, match=f"^{name} has no champion to go back to: make promote version=N"):
        champion.rollback(name, "why")
    assert moves(store, name) == [] if rights == (19,) else len(moves(store, name)) == 1


def test_a_refused_version_is_promoted_by_hand(store, name):
    reign(name, 60, 61)
    champion.promote(name, "2", "smaller")
    assert aliases(store, name) == {"champion": "2", "previous": "1"}
    assert moves(store, name)[-1] == "champion 1 -> 2: promoted by hand: smaller"
    before = contents(store, name)
    assert champion.promote(name, "2", "smaller") == f"{name} version 2 is the champion already"
    assert contents(store, name) == before


def lose_the_files(store: MlflowClient, name: str, number: str) -> None:
    anchors.Path(store.get_model_version_download_uri(name, number).removeprefix("file://"), "MLmodel").unlink()


def test_a_version_whose_files_are_gone_serves_nobody(store, name):
    reign(name, 60, 80)
    lose_the_files(store, name, "1")
    for move in (lambda: champion.rollback(name, "why"), lambda: champion.promote(name, "1", "why")):
        with pytest.raises(UserError, match=f"^{name} version 1: its files are gone: take another version$"):
            move()
    assert aliases(store, name) == {"champion": "2", "previous": "1"}
    assert "withdrawn" not in tags(store, name, "2")


def test_wrong_words_are_refused_in_one_line(name):
    with pytest.raises(UserError, match=f"^no model {name} is registered: run the pipeline first: make run$"):
        champion.promote(name, "1", "why")
    reign(name, 60, 80)
    with pytest.raises(UserError, match=f"^{name} has no version '7': take one of champion, previous, 1, 2$"):
        champion.promote(name, "7", "why")
    for reason in ("", " \n", "x" * 501):
        with pytest.raises(UserError, match="^the reason has .* characters: give one of 1 to 500"):
            champion.promote(name, "1", reason)
        with pytest.raises(UserError, match="^the reason has .* characters: give one of 1 to 500"):
            champion.rollback(name, reason)


def test_no_secret_that_somebody_wrote_is_kept(store, name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "open  sesame")  # as it is written, before the reason becomes one line
    version, policy = add_version(name, "a"), candidate(60)
    card = registered.papers(policy, "# card\nfetched with open  sesame\n")
    champion.decide(version, policy, card, registered.GATE, "strict")
    decide(add_version(name, "b"), candidate(80))
    champion.promote(name, "1", "try hf://org/x?token=open  sesame or\nopen  sesame")
    champion.rollback(name, "postgresql://ann:hunter22@host/base was full")
    told = "postgresql://ann:***@host/base was full"
    assert moves(store, name)[2:] == [
        "champion 2 -> 1: promoted by hand: try hf://org/x?token=*** or ***",
        f"champion 1 -> 2: rolled back by hand: {told}",
    ]
    assert tags(store, name, "1")["withdrawn"] == told
    description = store.get_model_version(name, "1").description
    assert description == "# card\nfetched with ***\n"
    assert download(store.get_model_version(name, "1"), "README.md", tmp_path).read_text() == description


def test_a_lock_that_is_no_postgresql_is_refused(name, monkeypatch):
    monkeypatch.setenv("RLHF_REGISTRY_LOCK", "redis://user:secret@host")
    with pytest.raises(UserError, match=r"^RLHF_REGISTRY_LOCK=redis://user:\*\*\*@host: no PostgreSQL: "):
        champion.rollback(name, "why")
