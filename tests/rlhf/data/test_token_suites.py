"""The data gate on prompts and preferences: each expectation has data that fails it, and only it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.data.expectations import Suite, evaluate
from rlhf.data.preferences import Pair
from rlhf.data.token_suites import preferences, prompts


def told(checks: list[Suite], place: Path) -> list[str]:
    return [str(failure) for failure in evaluate(checks, place).failures]


# --- prompts


@pytest.mark.parametrize(("long", "passes"), [(2, True), (3, False)])
def test_more_long_prompts_than_a_tenth_fail(tmp_path: Path, long: int, passes: bool) -> None:
    questions = [f"question {i}" for i in range(20)]
    suite = prompts("test", questions, [11] * long + [10] * (20 - long), longest=10)
    expected = (
        "prompts test: expected that at most 10% of the prompts are longer than 10 tokens: 3 of its rows fail: "
        "row 0 'question 0', row 1 'question 1', row 2 'question 2'"
    )
    assert told([suite], tmp_path) == ([] if passes else [expected])


# --- preferences


def check_pairs(pairs: list[Pair], tokens: int = 10) -> list[Suite]:
    return [preferences("train", pairs, [tokens] * len(pairs), 10, {"secret"}, {"over there"})]


GOOD = [Pair("q", "a", "b", "human"), Pair("q", "a", "", "sampled"), Pair("r", "a", "b", "gold")]


def test_sound_pairs_pass(tmp_path: Path) -> None:
    assert told(check_pairs(GOOD), tmp_path) == []


@pytest.mark.parametrize(
    ("pair", "expectation"),
    [
        (Pair(" ", "a", "b", "human"), "question is not empty"),
        (Pair("s", "", "b", "human"), "chosen is not empty"),
        (Pair("s", "a", "a", "human"), "chosen and rejected differ"),
        (Pair("SECRET!", "a", "b", "human"), "the question is not in validation, gate, test"),
        (Pair("over there", "a", "b", "human"), "the question is not in the validation pairs"),
    ],
)
def test_each_expectation_has_a_pair_that_fails_it_alone(tmp_path: Path, pair: Pair, expectation: str) -> None:
    expected = f"preferences train: expected that {expectation}: 1 of its rows fail: row 3 {pair.question.strip()!r}"
    assert told(check_pairs([*GOOD, pair]), tmp_path) == [expected]


def test_a_pair_that_comes_twice_or_is_too_long_fails(tmp_path: Path) -> None:
    assert told(check_pairs([*GOOD, GOOD[2]]), tmp_path) == [
        "preferences train: expected that no pair comes twice: 2 of its rows fail: row 2 'r', row 3 'r'"
    ]
    assert told(check_pairs(GOOD[:1], tokens=11), tmp_path) == [
        "preferences train: expected that question and answers fit the context of 10 tokens: "
        "1 of its rows fail: row 0 'q'"
    ]
