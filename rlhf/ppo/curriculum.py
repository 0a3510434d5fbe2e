"""Which prompts an iteration takes: epochs of permutations, and before them the easy ones if so wished."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhf.params import Ppo
from rlhf.ppo.rollout import Prompt
from rlhf.streams import Purpose, permutation, shuffled_slice


def iteration_prompts(prompts: Sequence[Prompt], settings: Ppo, seed: int, iteration: int) -> NDArray[np.int64]:
    """The numbers of the prompts of `iteration`, `prompts_per_iteration` many.

    A row of epochs, each a permutation. With a curriculum (Bengio et al., 2009) of N iterations, iteration i < N draws
    from the easiest (i + 1) / N of the prompts, those with the fewest solution steps, and the epochs begin after it.
    Nothing but the iteration's number is needed to go on.
    """
    count, easy = settings.prompts_per_iteration, settings.curriculum_iterations
    if iteration >= easy:
        return shuffled_slice(seed, Purpose.SHUFFLE_PROMPTS, (iteration - easy) * count, count, len(prompts))
    easiest_first = np.argsort([prompt.problem.steps for prompt in prompts], kind="stable")
    pool = min(len(prompts), max(count, -(-len(prompts) * (iteration + 1) // easy)))
    drawn = permutation(seed, Purpose.CURRICULUM, iteration, pool)
    return easiest_first[np.resize(drawn, count)]
