from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlhf.config import compose, validate
from rlhf.data.gsm8k import Problem
from rlhf.data.prompts import encode_response, render_prompt
from rlhf.errors import UserError
from rlhf.evaluation import accuracy as module
from rlhf.evaluation.accuracy import accuracy, evaluate_model
from rlhf.generation.engine import Sample
from rlhf.models.tiny import make_tiny
from rlhf.params import Params


@pytest.fixture(scope="module")
def params() -> Params:
    return validate(compose(["scale=smoke", "prompt.max_tokens=60"]))


@pytest.fixture(scope="module")
def tiny(params: Params) -> tuple[Any, Any]:
    return make_tiny(params.sft.tiny, seed=0)


def problem(question: str, gold: str | None) -> Problem:
    return Problem(question, f"#### {gold}", gold, f"#### {gold}", 0, "test")


def answered_with(monkeypatch: pytest.MonkeyPatch, samples: Sequence[Sample]) -> dict[str, Any]:
    """Replaces the engine; returns what it was called with."""
    call: dict[str, Any] = {}

    def generate(model: object, prompts: Sequence[list[int]], *, on_rows: Any = None, **settings: Any) -> list[Sample]:
        call.update(settings, prompts=prompts)
        if on_rows:
            on_rows(len(prompts))
        return list(samples)

    monkeypatch.setattr(module, "generate", generate)
    return call


def sample(tokenizer: Any, text: str, finished: bool = True) -> Sample:
    tokens = encode_response(tokenizer, text)
    tokens = tokens if finished else tokens[:-1]
    return Sample(tokens, [0.0] * len(tokens), finished)


def test_responses_are_graded_in_the_order_of_the_problems(
    monkeypatch: pytest.MonkeyPatch, params: Params, tiny: tuple[Any, Any]
) -> None:
    model, tokenizer = tiny
    long = "How many apples are there? " * 40
    problems = [problem("a?", "12"), problem(long, "3"), problem("b?", "7"), problem("c?", "5"), problem("d?", "9")]
    responses = [
        sample(tokenizer, "6 + 6 = 12\n#### 12"),
        sample(tokenizer, "So there are 7"),
        sample(tokenizer, "#### 5", finished=False),
        sample(tokenizer, "#### 8"),
    ]
    call = answered_with(monkeypatch, responses)
    done: list[int] = []
    graded = evaluate_model(model, tokenizer, problems, params, on_rows=done.append)

    assert [row.question for row in graded] == ["a?", long, "b?", "c?", "d?"]
    assert [row.gold for row in graded] == ["12", "3", "7", "5", "9"]
    assert [row.correct for row in graded] == [True, False, False, True, False]
    assert [row.strict for row in graded] == [True, False, False, True, False]
    assert [row.flexible for row in graded] == [True, False, True, True, False]
    assert [row.too_long for row in graded] == [False, True, False, False, False]
    assert [row.parse_failure for row in graded] == [False, False, True, False, False]
    assert [row.cut_off for row in graded] == [False, False, False, True, False]
    assert graded[0].response == "6 + 6 = 12\n#### 12"
    assert [row.length for row in graded] == [len(responses[0].tokens), 0, *(len(r.tokens) for r in responses[1:])]
    assert accuracy(graded) == pytest.approx(2 / 5)
    assert sum(done) == 5
    assert [row.prompt for row in graded if not row.too_long] == call["prompts"] and graded[1].prompt == []
    assert call["prompts"] == [render_prompt(tokenizer, q, params.prompt) for q in ("a?", "b?", "c?", "d?")]
    assert call["stop_ids"] == [tokenizer.eos_token_id]
    assert call["max_new_tokens"] == params.ppo.sampling.max_new_tokens
    assert call["batch_size"] == params.evaluation.batch_size
    assert "temperature" not in call  # the engine's default is greedy


def test_the_flexible_method_decides_where_params_say_so(
    monkeypatch: pytest.MonkeyPatch, tiny: tuple[Any, Any]
) -> None:
    model, tokenizer = tiny
    answered_with(monkeypatch, [sample(tokenizer, "So there are 7")])
    flexible = validate(compose(["scale=smoke", "verifier.method=flexible"]))
    (row,) = evaluate_model(model, tokenizer, [problem("b?", "7")], flexible)
    assert (row.correct, row.strict, row.flexible, row.parsed) == (True, False, True, True)


def test_a_problem_without_gold_is_refused(
    monkeypatch: pytest.MonkeyPatch, params: Params, tiny: tuple[Any, Any]
) -> None:
    model, tokenizer = tiny
    answered_with(monkeypatch, [])
    with pytest.raises(UserError, match="no gold answer for the question 'b\\?'"):
        evaluate_model(model, tokenizer, [problem("a?", "1"), problem("b?", None)], params)


def test_the_real_engine_answers_greedily_and_the_same_each_time(params: Params, tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    problems = [problem("Ann has 3 pens. How many?", "3"), problem("Bob?", "4")]
    first = evaluate_model(model, tokenizer, problems, params)
    assert first == evaluate_model(model, tokenizer, problems, params)
    assert all(1 <= row.length <= params.ppo.sampling.max_new_tokens for row in first)
    assert all(row.finished or row.length == params.ppo.sampling.max_new_tokens for row in first)
