"""The file of right answers: written, read, and compared with another one."""

from __future__ import annotations

from hashlib import sha256

import pytest

from rlhf.evaluation.accuracy import Graded
from rlhf.evaluation.right_answers import compare_common, problem_id, read_right_answers, right_answers_csv
from rlhf.evaluation.statistics import PairedTable


def graded(question: str, strict: bool, flexible: bool) -> Graded:
    return Graded(
        question=question,
        gold="4",
        response="",
        correct=strict,
        strict=strict,
        flexible=flexible,
        parsed=True,
        finished=True,
        tokens=[],
        too_long=False,
    )


def test_what_is_written_is_read_by_either_method():
    text = right_answers_csv([graded("2 + 2?", True, True), graded("1 + 3?", False, True)])
    first, second = problem_id("2 + 2?", "4"), problem_id("1 + 3?", "4")
    assert text == f"problem,strict,flexible\n{first},1,1\n{second},0,1\n"
    assert read_right_answers(text, "strict") == {first: True, second: False}
    assert read_right_answers(text, "flexible") == {first: True, second: True}


def test_a_problem_is_its_question_with_its_right_answer():
    assert problem_id("2 + 2?", "4") == sha256(b"2 + 2?\n4").hexdigest()[:16]
    assert problem_id("2 + 2?", "5") != problem_id("2 + 2?", "4")


@pytest.mark.parametrize(
    "text",
    ["", "problem,strict,flexible\n", "problem,flexible\na,1\n", "problem,strict\na,yes\n", "problem,strict\n,1\n"],
)
def test_another_file_is_refused(text):
    with pytest.raises(ValueError, match="no rows of problem,strict,flexible"):
        read_right_answers(text, "strict")


def test_only_shared_problems_are_compared():
    before = {"a": True, "b": False, "c": True, "d": False, "e": True}
    after = {"d": False, "c": False, "b": True, "a": True, "f": True}
    assert compare_common(before, after) == PairedTable(both_right=1, gained=1, lost=1, both_wrong=1)
    assert compare_common({"a": True}, {"b": True}).n == 0
