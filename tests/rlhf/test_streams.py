"""Random123's known answers, and what the streams promise: disjoint purposes, epochs that are permutations."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf.streams import Purpose, permutation, philox, shuffled_slice, token_uniforms, uniforms

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: str
) -> None:
    assert [int(word) for word in philox(counter, key)] == [int(word, 16) for word in answer.split()]


def test_uniforms_are_made_of_the_first_53_bits() -> None:
    words = philox((3, 5, 7, 11), (13, int(Purpose.ROLLOUT)))
    by_hand = ((int(words[0]) >> 5) * 2**26 + (int(words[1]) >> 6)) / 2**53
    assert uniforms(13, Purpose.ROLLOUT, 3, 5, 7, 11) == by_hand


def test_uniforms_stay_in_range_and_look_uniform() -> None:
    values = uniforms(0, Purpose.ROLLOUT, position=np.arange(100_000))
    assert values.min() >= 0 and values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8  # chi-square, 19 degrees of freedom, 0.1 %


def test_every_part_of_the_name_of_a_draw_matters() -> None:
    names = [(0, 1, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0), (0, 2, 0, 0, 0, 0)]
    names += [(0, 1, *counter) for counter in np.eye(4, dtype=int).tolist()]
    drawn = {float(uniforms(seed, Purpose(purpose), *counter)) for seed, purpose, *counter in names}
    assert len(drawn) == len(names)


def test_purposes_never_share_a_number() -> None:
    drawn = [uniforms(0, purpose, position=np.arange(2000)) for purpose in Purpose]
    assert len(np.unique(np.concatenate(drawn))) == 2000 * len(Purpose)


def test_token_uniforms_do_not_depend_on_the_rows_around() -> None:
    together = token_uniforms(5, Purpose.ROLLOUT, 2, [40, 7, 40], [0, 1, 1], 9)
    alone = token_uniforms(5, Purpose.ROLLOUT, 2, [7], [1], 9)
    assert together.shape == (3, 9)
    assert (together[1] == alone[0]).all()
    assert together[1, 4] == uniforms(5, Purpose.ROLLOUT, 2, 7, 1, 4)


def test_a_shorter_length_is_a_prefix_of_a_longer_one() -> None:
    long = token_uniforms(0, Purpose.ROLLOUT, 0, [1, 2], [0, 0], 20)
    short = token_uniforms(0, Purpose.ROLLOUT, 0, [1, 2], [0, 0], 8)
    assert (long[:, :8] == short).all()


def test_permutations_hold_every_number_once_and_differ() -> None:
    orders = [permutation(0, Purpose.SHUFFLE_PROMPTS, iteration, 50) for iteration in range(3)]
    orders += [permutation(1, Purpose.SHUFFLE_PROMPTS, 0, 50), permutation(0, Purpose.SHUFFLE_PAIRS, 0, 50)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5


def test_shuffled_slices_flow_over_epochs_that_are_permutations() -> None:
    size, count = 7, 5
    pieces = [shuffled_slice(3, Purpose.SHUFFLE_PROMPTS, start, count, size) for start in range(0, 35, count)]
    row = np.concatenate(pieces)
    epochs = row.reshape(-1, size)
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert (epochs[0] != epochs[1]).any()
    for number, epoch in enumerate(epochs):
        assert (epoch == permutation(3, Purpose.SHUFFLE_PROMPTS, number, size)).all()


def test_a_slice_longer_than_the_data_holds_whole_epochs() -> None:
    row = shuffled_slice(0, Purpose.SHUFFLE_DEMONSTRATIONS, 0, 12, 4)
    assert np.bincount(row).tolist() == [3, 3, 3, 3]
