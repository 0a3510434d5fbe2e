"""The built-in word problems: GSM8K's exact format, small numbers, one or two steps.

Gold answers are always right. Demonstrations are not: each template has one careless strategy (the wrong operation,
or the last step forgotten) that a named share of its demonstrations uses, so that a policy that imitates them has
something to learn from a verifier. Additive operands are 2-6 and multiplicative ones 2-4: facts that a tiny model
knows after a short supervised fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import Literal

from rlhf.errors import UserError
from rlhf.params import Generator

# fmt: off
NAMES = (
    "Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jack", "Kim", "Leo",
    "Mia", "Nina", "Omar", "Paul", "Rosa", "Sam", "Tina", "Uma", "Vera", "Will", "Yara", "Zoe",
)
THINGS = (
    "apples", "books", "cards", "coins", "cups", "eggs", "hats", "keys", "pens", "shells", "stamps", "toys",
)
CONTAINERS = ("bags", "boxes", "jars", "packs")
# fmt: on

Operation = Literal["+", "-", "*"]


@dataclass(frozen=True)
class WordProblem:
    """A question, its right worked answer, and the answer that a demonstrator wrote: right or careless."""

    question: str
    answer: str
    demonstration: str


@dataclass(frozen=True)
class Step:
    """One line of a rationale: `text` with the calculation in place of `{}`."""

    text: str
    left: int
    operation: Operation
    right: int

    @property
    def result(self) -> int:
        """The value of the calculation."""
        match self.operation:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
            case "*":
                return self.left * self.right

    def __str__(self) -> str:
        calculation = f"{self.left}{self.operation}{self.right}"
        return self.text.format(f"{calculation}=<<{calculation}={self.result}>>{self.result}")


@dataclass(frozen=True)
class Draft:
    """A question with its right steps and its template's careless ones, which end on another number."""

    question: str
    right: tuple[Step, ...]
    careless: tuple[Step, ...]


@dataclass(frozen=True)
class Scene:
    """Who and what a problem is about."""

    name: str
    friend: str
    things: str
    containers: str


def _additive(random: Random) -> int:
    return random.randint(2, 6)


def _multiplicative(random: Random) -> int:
    return random.randint(2, 4)


def _descending(random: Random) -> tuple[int, int]:
    """Two different additive operands, the larger one first."""
    small, large = sorted(random.sample(range(2, 7), 2))
    return large, small


def _gift(random: Random, s: Scene) -> Draft:
    a, b = _descending(random)
    question = (
        f"{s.name} has {a} {s.things}. {s.friend} gives {s.name} {b} more. How many {s.things} does {s.name} have?"
    )
    text = f"{s.name} has {{}} {s.things}."
    return Draft(question, (Step(text, a, "+", b),), careless=(Step(text, a, "-", b),))


def _giving_away(random: Random, s: Scene) -> Draft:
    a, b = _descending(random)
    question = f"{s.name} has {a} {s.things}. {s.name} gives {s.friend} {b}. How many {s.things} does {s.name} keep?"
    text = f"{s.name} keeps {{}} {s.things}."
    return Draft(question, (Step(text, a, "-", b),), careless=(Step(text, a, "+", b),))


def _containers(random: Random, s: Scene) -> Draft:
    a, b = _multiplicative(random), random.randint(3, 4)  # 2*2 equals the careless 2+2
    question = f"{s.name} and {s.friend} fill {a} {s.containers} with {b} {s.things} each. How many {s.things} is that?"
    text = f"That is {{}} {s.things}."
    return Draft(question, (Step(text, a, "*", b),), careless=(Step(text, a, "+", b),))


def _containers_and_more(random: Random, s: Scene) -> Draft:
    a, b, c = _multiplicative(random), _multiplicative(random), _additive(random)
    question = (
        f"{s.name} buys {a} {s.containers} of {b} {s.things}. {s.friend} brings {c} more. "
        f"How many {s.things} are there in all?"
    )
    first = Step(f"The {s.containers} hold {{}} {s.things}.", a, "*", b)
    return Draft(question, (first, Step(f"In all there are {{}} {s.things}.", a * b, "+", c)), careless=(first,))


def _three_days(random: Random, s: Scene) -> Draft:
    a, b, c = _additive(random), _additive(random), _additive(random)
    question = (
        f"{s.name} finds {a} {s.things} on Monday, {b} on Tuesday and {c} on Friday. "
        f"How many {s.things} does {s.name} find?"
    )
    first = Step(f"By Tuesday {s.name} finds {{}} {s.things}.", a, "+", b)
    return Draft(
        question, (first, Step(f"By Friday {s.name} finds {{}} {s.things}.", a + b, "+", c)), careless=(first,)
    )


def _gain_and_loss(random: Random, s: Scene) -> Draft:
    (a, c), b = _descending(random), _additive(random)
    question = f"{s.name} has {a} {s.things}, buys {b} more and loses {c}. How many {s.things} does {s.name} have now?"
    first = Step(f"{s.name} buys more and has {{}} {s.things}.", a, "+", b)
    return Draft(question, (first, Step(f"Now {s.name} has {{}} {s.things}.", a + b, "-", c)), careless=(first,))


def _containers_and_fewer(random: Random, s: Scene) -> Draft:
    a, b, c = random.randint(3, 4), _multiplicative(random), random.randint(2, 5)
    question = (
        f"{s.name} opens {a} {s.containers} of {b} {s.things} and breaks {c}. How many {s.things} are still good?"
    )
    first = Step(f"{s.name} opens {{}} {s.things}.", a, "*", b)
    text = f"Still good are {{}} {s.things}."
    right, careless = Step(text, a * b, "-", c), Step(text, a * b, "+", c)
    return Draft(question, (first, right), careless=(first, careless))


def _times_as_many(random: Random, s: Scene) -> Draft:
    a, b = _multiplicative(random), _multiplicative(random)
    question = (
        f"{s.name} has {a} {s.things}. {s.friend} has {b} times as many. How many {s.things} do they have together?"
    )
    first = Step(f"{s.friend} has {{}} {s.things}.", b, "*", a)
    return Draft(question, (first, Step(f"Together they have {{}} {s.things}.", a * b, "+", a)), careless=(first,))


TEMPLATES: tuple[Callable[[Random, Scene], Draft], ...] = (
    _gift,
    _giving_away,
    _containers,
    _containers_and_more,
    _three_days,
    _gain_and_loss,
    _containers_and_fewer,
    _times_as_many,
)
"""The first of every four is careless with share `careless_low`, the others with `careless_high`."""

PATIENCE = 1000
"""Draws in a row that may repeat a question before a template counts as used up."""


def generate(
    count: int, seed: int | str, *, careless_low: float, careless_high: float, exclude: Collection[str] = frozenset()
) -> list[WordProblem]:
    """`count` problems with distinct questions, none of them in `exclude`; the templates take turns.

    The same seed gives the same questions whatever the shares, and a longer list starts with the shorter one.
    Raises UserError when a template has no new question left.
    """
    random, carelessness = Random(f"{seed}/questions"), Random(f"{seed}/carelessness")
    seen = set(exclude)
    problems = []
    for index in range(count):
        kind = index % len(TEMPLATES)
        draft = _new_draft(random, kind, seen)
        seen.add(draft.question)
        careless = carelessness.random() < (careless_high if kind % 4 else careless_low)
        demonstration = _written(draft.careless if careless else draft.right)
        problems.append(WordProblem(draft.question, _written(draft.right), demonstration))
    return problems


def generate_splits(params: Generator) -> dict[str, list[WordProblem]]:
    """The splits `train` and `test`: no question twice, and test does not depend on the size of train."""

    def split(name: str, count: int, exclude: Collection[str]) -> list[WordProblem]:
        return generate(
            count,
            f"{params.seed}/{name}",
            careless_low=params.careless_low,
            careless_high=params.careless_high,
            exclude=exclude,
        )

    test = split("test", params.test, exclude=())
    return {"train": split("train", params.train, exclude={problem.question for problem in test}), "test": test}


def _new_draft(random: Random, kind: int, seen: Collection[str]) -> Draft:
    for _ in range(PATIENCE):
        name, friend = random.sample(NAMES, 2)
        draft = TEMPLATES[kind](random, Scene(name, friend, random.choice(THINGS), random.choice(CONTAINERS)))
        if draft.question not in seen:
            return draft
    raise UserError(
        f"data.generator: {len(seen)} problems use up a template: lower data.generator.train or data.generator.test"
    )


def _written(steps: tuple[Step, ...]) -> str:
    """A rationale in GSM8K's format."""
    return "\n".join([*map(str, steps), f"#### {steps[-1].result}"])
