"""`python -m rlhf.registry`: what it prints, and one line where it cannot."""

from __future__ import annotations

import re
from uuid import uuid4

import pytest

from rlhf import config
from rlhf.config import compose
from rlhf.registry.__main__ import main
from tests import registered
from tests.registered import add_version, candidate, decide


@pytest.fixture
def name(tmp_path, monkeypatch) -> str:
    """The model that params.yaml names."""
    monkeypatch.chdir(tmp_path)
    name = f"model-{uuid4().hex}"
    config.write(compose(["scale=smoke", f"registry.name={name}"]))
    return name


def test_a_version_is_promoted_rolled_back_and_listed(name, capsys):
    for policy, count in {"a": 60, "b": 19}.items():
        decide(add_version(name, policy), candidate(count))
    registered.store().set_model_version_tag(name, "2", "gate.gain", "-0.01")
    registered.store().set_model_version_tag(name, "2", "test.policy_accuracy", "0.195")
    assert main(["promote", "2", "--reason", "a try"]) == 0
    assert capsys.readouterr().out == f"{name} version 2 is champion; previous: 1\n"
    assert main(["rollback", "--reason", "it failed"]) == 0
    assert capsys.readouterr().out == f"{name} version 1 is champion; previous: 2, withdrawn\n"
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == name
    assert [line.split() for line in lines[1:4]] == [
        ["version", "alias", "gate", "gain", "on", "gate", "right", "on", "test", "why"],
        ["2", "previous", "withdrawn", "-1.0", "19.5", "%", "it", "failed"],
        ["1", "champion", "passed", *["gain", "on", "gate", "+40.0", "points,", "p", "9.1e-13"]],
    ]
    assert [line.split(" ", 1)[1] for line in lines[5:]] == [
        "champion none -> 1: passed the gate: gain on gate +40.0 points, p 9.1e-13",
        "champion 1 -> 2: promoted by hand: a try",
        "champion 2 -> 1: rolled back by hand: it failed",
    ]


def test_another_model_is_named_by_hand(name, capsys):
    assert main(["--name", "never-registered", "list"]) == 1
    assert (
        capsys.readouterr().err
        == "registry: no model never-registered is registered: run the pipeline first: make run\n"
    )


@pytest.mark.parametrize("words", [[], ["promote"], ["rollback"], ["promote", "2"], ["demote", "2"]])
def test_a_missing_word_is_a_usage_error(name, capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("uri", "fault"),
    [
        ("mysql://x/y", "No module named 'MySQLdb'"),
        ("postgresql://u:hidden@127.0.0.1:1/db", ".*refused.*"),  # at once: MLflow would try for minutes
    ],
)
def test_a_database_that_cannot_be_opened_is_told_in_one_line(name, uri, fault, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert main(["list"]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(rf"registry: MLflow at \w.*: {fault}: start it, or set MLFLOW_TRACKING_URI\n", error), error
    assert "hidden" not in error
