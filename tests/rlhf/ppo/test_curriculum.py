"""Which prompts an iteration takes, by hand."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.data.gsm8k import Problem
from rlhf.ppo.curriculum import iteration_prompts
from rlhf.ppo.rollout import Prompt
from tests.rlhf.ppo.toy import toy_params

STEPS = [3, 1, 2, 1, 3, 2, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]
EASIEST_FIRST = [1, 3, 6, 9, 12, 15, 18, 2, 5, 7, 10, 13, 16, 19, 0, 4, 8, 11, 14, 17]


def drawn(iteration: int, *overrides: str, seed: int = 0, steps: Sequence[int] = STEPS) -> list[int]:
    prompts = [Prompt(Problem("", "", None, "", count, ""), []) for count in steps]
    return iteration_prompts(prompts, toy_params(*overrides).ppo, seed, iteration).tolist()


def test_without_a_curriculum_five_iterations_of_eight_are_two_epochs_of_twenty() -> None:
    rows = [number for iteration in range(5) for number in drawn(iteration)]
    assert sorted(rows[:20]) == sorted(rows[20:]) == list(range(20))
    assert rows[:20] != rows[20:]


def test_a_curriculum_draws_from_the_easiest_share_and_then_from_the_epochs() -> None:
    curriculum = "ppo.curriculum_iterations=2"
    first, second = drawn(0, curriculum), drawn(1, curriculum)
    assert len(set(first)) == len(set(second)) == 8
    assert set(first) <= set(EASIEST_FIRST[:10])
    assert not set(second) <= set(EASIEST_FIRST[:10])
    assert drawn(2, curriculum) == drawn(0)
    assert drawn(3, curriculum) == drawn(1)


def test_a_share_smaller_than_an_iteration_is_filled_up_from_the_next_easiest() -> None:
    assert set(drawn(0, "ppo.curriculum_iterations=10")) == set(EASIEST_FIRST[:8])


def test_fewer_prompts_than_an_iteration_come_again() -> None:
    few = drawn(0, "ppo.curriculum_iterations=1", steps=[2, 1, 1])
    assert len(few) == 8 and set(few) == {0, 1, 2}


def test_the_curriculum_is_keyed_by_seed_and_iteration() -> None:
    curriculum = "ppo.curriculum_iterations=3"
    assert drawn(2, curriculum) == drawn(2, curriculum)
    assert drawn(2, curriculum) != drawn(2, curriculum, seed=1)
