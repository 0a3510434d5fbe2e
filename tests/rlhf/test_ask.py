"""`make ask`: an answer on standard output, or one line and an exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf import ask, config
from rlhf.config import compose
from rlhf.registry import answer
from rlhf.registry.answer import Answer
from tests.policies import save_policy

QUESTION = "Tom has 3 apples and eats 2. How many are left?"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("workspace")
    config.write(compose(["scale=smoke", "registry.name=never-registered"]), place / "params.yaml")
    save_policy(place / "models" / "policy")
    return place


@pytest.fixture(autouse=True)
def _in_the_workspace(workspace, monkeypatch):
    monkeypatch.chdir(workspace)


def complaint(capsys) -> str:
    """The one line that a failed command printed."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_a_directory_answers(capsys):
    assert ask.main([QUESTION, "--policy", "models/policy"]) == 0
    first = capsys.readouterr().out
    assert first.strip()
    assert ask.main(["What is 2 plus 2?", "--policy", "models/policy"]) == 0
    assert capsys.readouterr().out != first


@pytest.mark.parametrize("question", ["", "  \n"])
def test_an_empty_question_is_a_usage_error(question, capsys):
    assert ask.main([question]) == 2
    assert 'make ask Q="..."' in complaint(capsys)


def test_who_answers_is_told_beside_the_answer(capsys, monkeypatch):
    said = Answer("#### 1", "never-registered version 3 (champion)")
    monkeypatch.setattr(answer, "ask_registered", lambda *_: said)
    assert ask.main([QUESTION]) == 0
    assert capsys.readouterr() == ("#### 1\n", "never-registered version 3 (champion) answers:\n")


def test_without_a_candidate_it_says_what_to_do(capsys):
    assert ask.main([QUESTION]) == 1
    assert "no model never-registered is registered: run the pipeline first: make run" in complaint(capsys)


def test_a_question_that_is_too_long_is_refused(capsys):
    assert ask.main(["word " * 5000, "--policy", "models/policy"]) == 1
    assert "this policy reads at most" in complaint(capsys)


def test_a_directory_that_is_no_checkpoint_is_named(capsys):
    assert ask.main([QUESTION, "--policy", "models/nothing"]) == 1
    assert "models/nothing" in complaint(capsys)


def test_ctrl_c_is_one_line(capsys, monkeypatch):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(ask, "ask_directory", interrupted)
    assert ask.main([QUESTION, "--policy", "models/policy"]) == 1
    assert complaint(capsys) == "ask: interrupted\n"
