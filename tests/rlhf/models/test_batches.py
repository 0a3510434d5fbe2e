"""The frame: which actions belong to the response, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from rlhf.models.batches import TokenBatch, by_length, micro_batches, pad

PAD = 9


def batch() -> TokenBatch:
    """Lengths 5, 2 and 4; the last row ends in a response token that equals the pad token."""
    return pad([[1, 2, 3], [4], [5, 6, 7]], [[10, 11], [12], [9]], PAD)


def test_pads_on_the_right() -> None:
    assert batch().tokens.tolist() == [[1, 2, 3, 10, 11], [4, 12, PAD, PAD, PAD], [5, 6, 7, 9, PAD]]
    assert batch().prompt_lengths.tolist() == [3, 1, 3]
    assert batch().lengths.tolist() == [5, 2, 4]
    assert batch().attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]


def test_the_mask_is_true_exactly_on_response_actions() -> None:
    """Action t produces token t+1: the first response token follows the last prompt token."""
    expected = [[0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 1, 0]]
    assert batch().mask.int().tolist() == expected
    assert batch().tokens[:, 1:][batch().mask].tolist() == [10, 11, 12, 9]


def test_last_actions_produce_the_last_token() -> None:
    assert batch().last_actions.tolist() == [3, 0, 2]
    rows = torch.arange(3)
    assert batch().mask[rows, batch().last_actions].all()
    assert batch().tokens[rows, batch().last_actions + 1].tolist() == [11, 12, 9]


def test_select_cuts_to_the_longest_row() -> None:
    part = batch().select(torch.tensor([2, 1]))
    assert part.tokens.tolist() == [[5, 6, 7, 9], [4, 12, PAD, PAD]]
    assert part.prompt_lengths.tolist() == [3, 1]
    assert part.mask.int().tolist() == [[0, 0, 1], [1, 0, 0]]
    assert len(part) == 2


@pytest.mark.parametrize(("prompts", "responses"), [([[1], []], [[2], [3]]), ([[1], [2]], [[3], []])])
def test_a_row_without_prompt_or_response_is_refused(prompts: list[list[int]], responses: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="every row"):
        pad(prompts, responses, PAD)


def test_micro_batches_hold_every_row_once_in_order() -> None:
    rows = torch.tensor([4, 2, 0, 1, 3])
    assert [part.tolist() for part in micro_batches(rows, 2)] == [[4, 2], [0, 1], [3]]
    assert [part.tolist() for part in micro_batches(rows, 9)] == [[4, 2, 0, 1, 3]]


def test_rows_of_like_lengths_come_together_once_there_are_several_pieces() -> None:
    batch = pad([[1]] * 5, [[1] * length for length in (7, 2, 9, 3, 7)], 0)
    rows = torch.tensor([4, 2, 0, 1, 3])
    assert [part.tolist() for part in by_length(batch, rows, 2)] == [[1, 3], [4, 0], [2]]
    assert [part.tolist() for part in by_length(batch, rows, 5)] == [[4, 2, 0, 1, 3]]
