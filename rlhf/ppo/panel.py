"""A few validation problems whose answers are kept at each validation, so that people can read how they change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from rlhf.data.gsm8k import Problem, question_hash
from rlhf.evaluation.accuracy import Graded
from rlhf.ppo.metrics import Row


class PanelAnswer(TypedDict):
    """A row of `plots/panel.csv`: the greedy answer to a panel problem after `iteration` iterations."""

    iteration: int
    question: str
    gold: str
    response: str
    correct: bool


class Validation(NamedTuple):
    """What a validation saw: its numbers, and the panel's problems, graded."""

    numbers: Row
    panel: Sequence[Graded] = ()


def panel_of(problems: Sequence[Problem], count: int) -> list[int]:
    """The numbers of the panel's problems, in the order of their questions' hashes.

    Rows that come or go beside them move none, and a larger panel holds the smaller one.
    """
    return sorted(range(len(problems)), key=lambda number: question_hash(problems[number].question, "panel"))[:count]


def panel_answers(iteration: int, panel: Sequence[Graded]) -> list[PanelAnswer]:
    """The panel's answers after `iteration` iterations, as they are kept."""
    return [
        PanelAnswer(
            iteration=iteration, question=row.question, gold=row.gold, response=row.response, correct=row.correct
        )
        for row in panel
    ]
