from __future__ import annotations

from rlhf.data.gsm8k import Problem, cut
from rlhf.evaluation.accuracy import Graded
from rlhf.ppo.panel import panel_answers, panel_of
from tests.rlhf.ppo.toy import toy_params


def problems(count: int) -> list[Problem]:
    return [Problem(f"question {n}", "#### 1", "1", "#### 1", 1, "test") for n in range(count)]


def questions(rows: list[Problem], count: int) -> list[str]:
    return [rows[number].question for number in panel_of(rows, count)]


def test_the_panel_does_not_move_with_the_rows_around_it() -> None:
    rows = problems(60)
    panel = questions(rows, 4)
    assert len(set(panel)) == 4
    assert questions(rows[::-1], 4) == panel
    kept = [row for number, row in enumerate(rows) if row.question in panel or number % 3]
    assert questions(kept, 4) == panel
    assert questions(rows, 9)[:4] == panel
    assert panel != [row.question for row in rows[:4]]


def test_the_panel_is_at_most_the_split_and_may_be_empty() -> None:
    assert sorted(panel_of(problems(3), 10)) == [0, 1, 2]
    assert panel_of(problems(3), 0) == []


def test_the_panel_is_not_what_a_cap_keeps_first() -> None:
    """A cap on validation keeps the lowest hashes; the panel's hash is another one."""
    data = toy_params().data.model_copy(update={"validation_share": 0.99, "max_validation": 4})
    capped = [row.question for row in cut(problems(200), [], data)["validation"]]
    assert set(capped) != set(questions(problems(200), 4))


def test_an_answer_is_kept_with_its_iteration() -> None:
    row = Graded("q?", "7", "#### 7", True, True, True, True, True, [3], [4, 1], False)
    assert panel_answers(6, [row]) == [
        {"iteration": 6, "question": "q?", "gold": "7", "response": "#### 7", "correct": True}
    ]
