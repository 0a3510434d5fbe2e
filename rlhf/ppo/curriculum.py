"""Which prompts an iteration takes: epochs of permutations, and before them the easy ones if so wished."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhf.params import Ppo
from rlhf.streams import Purpose, permutation, shuffled_slice


def iteration_prompts(steps: Sequence[int], settings: Ppo, seed: int, iteration: int) -> NDArray[np.int64]:
    """The numbers of the prompts of `iteration`, `prompts_per_iteration` many, of prompts with so many solution steps.

    A row of epochs, each a permutation. With a curriculum (Bengio et al., 2009) of N iterations, iteration i < N draws
    from the easiest (i + 1) / N of the prompts, and the epochs begin after it. Nothing but the iteration's number is
    needed to go on.
    """
    count, easy = settings.prompts_per_iteration, settings.curriculum_iterations
    if iteration >= easy:
        return shuffled_slice(seed, Purpose.SHUFFLE_PROMPTS, (iteration - easy) * count, count, len(steps))
    easiest_first = np.argsort(np.asarray(steps), kind="stable")
    pool = min(len(steps), max(count, -(-len(steps) * (iteration + 1) // easy)))
    drawn = permutation(seed, Purpose.CURRICULUM, iteration, pool)
    return easiest_first[np.resize(drawn, count)]
