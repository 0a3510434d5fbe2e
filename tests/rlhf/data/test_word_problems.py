"""The built-in word problems: format, right golds, careless shares, no question twice."""

from __future__ import annotations

import re

import pytest

from rlhf.data import word_problems
from rlhf.data.answers import extract_answer, has_single_final_answer
from rlhf.data.word_problems import TEMPLATES, WordProblem, generate, generate_splits
from rlhf.errors import UserError
from rlhf.params import Generator

PARAMS = Generator(seed=0, train=4000, test=400, careless_low=0.3, careless_high=0.6)
CALCULATION = re.compile(r"(\d+)([-+*])(\d+)=<<(\d+)([-+*])(\d+)=(-?\d+)>>(-?\d+)")


@pytest.fixture(scope="module")
def splits() -> dict[str, list[WordProblem]]:
    return generate_splits(PARAMS)


def test_the_same_seed_gives_the_same_problems_and_another_seed_others(splits: dict[str, list[WordProblem]]) -> None:
    assert generate_splits(PARAMS) == splits
    other = generate_splits(PARAMS.model_copy(update={"seed": 1}))
    assert other["train"][:50] != splits["train"][:50]


def test_first_problems_stay_as_they_are() -> None:
    """Written down once: another generator or another Python must not change anyone's data unseen."""
    first, second = generate(2, "0/train", careless_low=0.0, careless_high=1.0)
    assert first.question == "Gina has 4 cups. Yara gives Gina 3 more. How many cups does Gina have?"
    assert first.demonstration == first.answer == "Gina has 4+3=<<4+3=7>>7 cups.\n#### 7"
    assert second.answer == "Hugo keeps 5-2=<<5-2=3>>3 hats.\n#### 3"
    assert second.demonstration == "Hugo keeps 5+2=<<5+2=7>>7 hats.\n#### 7"


def test_no_question_comes_twice_in_train_and_test(splits: dict[str, list[WordProblem]]) -> None:
    questions = [problem.question for problems in splits.values() for problem in problems]
    assert (len(splits["train"]), len(splits["test"])) == (4000, 400)
    assert len(set(questions)) == len(questions) == 4400


def test_sizes_and_shares_leave_the_other_problems_alone(splits: dict[str, list[WordProblem]]) -> None:
    changed = {"train": 100, "careless_low": 0.0, "careless_high": 0.9}
    smaller = generate_splits(PARAMS.model_copy(update=changed))
    assert [p.question for p in smaller["test"]] == [p.question for p in splits["test"]]
    assert [p.question for p in smaller["train"]] == [p.question for p in splits["train"][:100]]


def test_rationales_are_in_the_published_format(splits: dict[str, list[WordProblem]]) -> None:
    for problem in splits["train"]:
        for text in (problem.answer, problem.demonstration):
            *steps, last = text.split("\n")
            assert 1 <= len(steps) <= 2
            assert re.fullmatch(r"#### \d+", last)
            assert has_single_final_answer(text)
            for step in steps:
                a, op, b, *inside, result, shown = CALCULATION.search(step).groups()  # type: ignore[union-attr]
                assert [a, op, b] == inside
                assert eval(f"{a}{op}{b}") == int(result) == int(shown)
            assert last == f"#### {shown}"


def test_gold_is_right_by_a_reading_of_the_question_alone(splits: dict[str, list[WordProblem]]) -> None:
    formulas = (
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b,
        lambda a, b, c: a * b + c,
        lambda a, b, c: a + b + c,
        lambda a, b, c: a + b - c,
        lambda a, b, c: a * b - c,
        lambda a, b: a * b + a,
    )
    assert len(formulas) == len(TEMPLATES)
    for index, problem in enumerate(splits["test"]):
        operands = [int(number) for number in re.findall(r"\d+", problem.question)]
        assert all(2 <= number <= 6 for number in operands)
        assert extract_answer(problem.answer) == formulas[index % len(formulas)](*operands)


def test_one_template_in_four_is_careless_with_the_low_share(splits: dict[str, list[WordProblem]]) -> None:
    """500 rows a template: three standard deviations are at most 0.066."""
    for kind in range(len(TEMPLATES)):
        rows = splits["train"][kind :: len(TEMPLATES)]
        share = sum(extract_answer(row.answer) != extract_answer(row.demonstration) for row in rows) / len(rows)
        assert share == pytest.approx(0.6 if kind % 4 else 0.3, abs=0.066)


def test_a_careless_demonstration_ends_on_a_wrong_number() -> None:
    problems = generate(800, "careless", careless_low=1.0, careless_high=1.0)
    assert all(extract_answer(p.answer) != extract_answer(p.demonstration) for p in problems)
    assert all(p.answer == p.demonstration for p in generate(80, "right", careless_low=0.0, careless_high=0.0))


def test_more_problems_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_problems, "NAMES", ("Ann", "Bob"))
    with pytest.raises(UserError, match=r"data\.generator.*lower data\.generator\.train"):
        generate(10_000, "many", careless_low=0.0, careless_high=0.0)
