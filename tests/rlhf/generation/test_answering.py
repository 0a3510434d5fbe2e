"""Answers by vote, and settings that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.generation.answering import AnsweringPolicy, Response, Settings, vote
from tests.policies import save_policy


def responses(*answers: str | None) -> list[Response]:
    return [Response(f"text {place}", answer, True) for place, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("answers", "text", "votes"),
    [
        (["5"], "text 0", 1),
        (["4", "5", "5"], "text 1", 2),
        (["4", "5", "5", "4"], "text 0", 2),
        ([None, "7", None], "text 1", 1),
        ([None, None], "text 0", 0),
    ],
)
def test_the_first_response_of_the_majority_is_the_answer(answers: list[str | None], text: str, votes: int) -> None:
    given = responses(*answers)
    answer = vote(given)
    assert (answer.response.text, answer.votes, answer.responses) == (text, votes, given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: ask for at least 1"),
        ({"samples": 0}, "samples=0: ask for at least 1"),
        ({"samples": 2}, "samples=2 at temperature=0 are all the same"),
        ({"temperature": -1.0}, "temperature=-1.0: take 0 for greedy"),
        ({"temperature": float("nan")}, "temperature=nan: take 0 for greedy"),
        ({"temperature": float("inf")}, "temperature=inf: take 0 for greedy"),
        ({"seed": -1}, "seed=-1: take a whole number from 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296: take a whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        Settings(**({"max_new_tokens": 8} | settings))


def test_an_answer_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    policy = AnsweringPolicy(save_policy(tmp_path / "policy"))
    questions = ["Two and two?", "How much are five pens at four coins each?", "Three and one?"]
    settings = Settings(8, samples=2, temperature=1.0, seed=3)
    together = policy.answer(questions, settings)
    assert together == [answer for question in questions for answer in policy.answer([question], settings)]
    assert len({response.text for answer in together for response in answer.responses}) == 6
    assert policy.answer(questions[:1], Settings(8, samples=2, temperature=1.0, seed=4)) != together[:1]
    with pytest.raises(UserError, match="the question is empty"):
        policy.answer(["Two and two?", "\n"], settings)
    with pytest.raises(UserError, match="the question is no text"):
        policy.answer(["Two and \udcff?"], settings)  # as Python reads a byte that is no UTF-8 from a command line
    with pytest.raises(UserError, match="exceed the model's context"):
        policy.answer(questions, Settings(100_000))
