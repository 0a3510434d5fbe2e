"""Counter-based random numbers: every draw is a function of what it is for, never of what was drawn before.

Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011). The key is (seed, purpose), the
counter is (iteration, prompt, sample, position). So neither an evaluation in between nor the number of processes nor
the batch size moves a stream.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


class Purpose(IntEnum):
    """What a stream is for; different purposes never share a number."""

    ROLLOUT = 1
    PREFERENCES = 2
    NORMALISATION = 3
    SHUFFLE_PROMPTS = 4
    SHUFFLE_MINIBATCHES = 5
    SHUFFLE_DEMONSTRATIONS = 6
    SHUFFLE_PAIRS = 7
    SHUFFLE_QUESTIONS = 8
    SHUFFLE_PTX = 9
    CURRICULUM = 10
    EVALUATION = 11
    SERVING = 12


def philox(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]
) -> list[NDArray[np.uint64]]:
    """Four arrays of 32-bit words for broadcastable 32-bit counters: ten rounds of Philox4x32."""
    words = [np.asarray(word, dtype=np.uint64) & _LOW for word in counter]
    keys = [np.uint64(key[0]) & _LOW, np.uint64(key[1]) & _LOW]
    for _ in range(10):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (second >> _WORD) ^ words[1] ^ keys[0],
            second & _LOW,
            (first >> _WORD) ^ words[3] ^ keys[1],
            first & _LOW,
        ]
        keys = [(keys[0] + _WEYL[0]) & _LOW, (keys[1] + _WEYL[1]) & _LOW]
    return words


def uniforms(
    seed: int,
    purpose: Purpose,
    iteration: ArrayLike = 0,
    prompt: ArrayLike = 0,
    sample: ArrayLike = 0,
    position: ArrayLike = 0,
) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, in the broadcast shape of the four counters."""
    counters = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) for c in (iteration, prompt, sample, position)))
    high, low, _, _ = philox((counters[0], counters[1], counters[2], counters[3]), (seed, int(purpose)))
    return ((high >> np.uint64(5)) * 2.0**26 + (low >> np.uint64(6))) / 2.0**53


def token_uniforms(
    seed: int, purpose: Purpose, iteration: int, prompts: ArrayLike, samples: ArrayLike, length: int
) -> NDArray[np.float64]:
    """(N, length) uniforms, one for each token position of N responses, given their prompt and sample numbers."""
    rows = np.asarray(prompts)[:, None], np.asarray(samples)[:, None]
    return uniforms(seed, purpose, iteration, *rows, np.arange(length)[None, :])


def permutation(seed: int, purpose: Purpose, iteration: int, size: int) -> NDArray[np.int64]:
    """A permutation of range(size), keyed by (seed, purpose, iteration)."""
    return np.argsort(uniforms(seed, purpose, iteration, np.arange(size)), kind="stable")


def shuffled_slice(seed: int, purpose: Purpose, position: int, count: int, size: int) -> NDArray[np.int64]:
    """The `count` row numbers from `position` on, in an endless row of epochs that are each a permutation of `size`."""
    places = np.arange(position, position + count)
    orders = {int(epoch): permutation(seed, purpose, int(epoch), size) for epoch in np.unique(places // size)}
    return np.array([orders[int(place // size)][place % size] for place in places], dtype=np.int64)
