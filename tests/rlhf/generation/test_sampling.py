"""Inverting the distribution function: against float64 search, by frequencies, and at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.generation.sampling import BLOCK, invert_cdf, next_tokens
from rlhf.streams import Purpose, uniforms

SIZES = [1, 2, 255, 256, 257, 600, 1024, 1300]
LARGEST = 1 - 2.0**-53


def random_probs(rows: int, size: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.softmax(spread * torch.randn(rows, size, generator=generator), dim=-1)


def draws(rows: int) -> Tensor:
    return torch.from_numpy(uniforms(0, Purpose.ROLLOUT, position=np.arange(rows)))


@pytest.mark.parametrize("size", SIZES)
def test_equals_a_float64_search_on_the_cumulative_sum(size: int) -> None:
    probs, drawn = random_probs(400, size), draws(400)
    cumulative = probs.double().cumsum(dim=-1)
    expected = torch.searchsorted(cumulative, drawn[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    assert invert_cdf(probs, drawn).equal(expected)


def test_frequencies_follow_the_probabilities() -> None:
    size, rows = 300, 60_000
    probs = random_probs(1, size, spread=1.0)
    counts = torch.bincount(invert_cdf(probs.expand(rows, -1), draws(rows)), minlength=size).double()
    expected = rows * probs[0].double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 378  # 299 degrees of freedom, 0.1 %


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("drawn", [0.0, 0.5, LARGEST])
def test_one_hot_gives_its_token_whatever_is_drawn(size: int, drawn: float) -> None:
    for token in {0, size // 2, size - 1}:
        probs = torch.nn.functional.one_hot(torch.tensor([token]), size).float()
        assert invert_cdf(probs, torch.tensor([drawn], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize("size", SIZES[1:])
def test_zero_takes_the_first_token_with_mass_and_almost_one_the_last(size: int) -> None:
    probs = random_probs(50, size)
    first, last = size // 3, size - size // 3 - 1
    probs[:, :first] = 0
    probs[:, last + 1 :] = 0
    assert invert_cdf(probs, torch.zeros(50, dtype=torch.float64)).eq(first).all()
    assert invert_cdf(probs, torch.full((50,), LARGEST, dtype=torch.float64)).eq(last).all()


def test_tokens_without_mass_are_never_drawn_across_empty_blocks() -> None:
    probs = torch.zeros(1, 4 * BLOCK + 10)
    probs[0, [3, 100, 3 * BLOCK + 5]] = torch.tensor([0.125, 0.25, 0.625])
    drawn = torch.tensor([0.0, 0.1249, 0.125, 0.3749, 0.375, LARGEST], dtype=torch.float64)
    tokens = invert_cdf(probs.expand(6, -1), drawn).tolist()
    assert tokens == [3, 3, 100, 100, 3 * BLOCK + 5, 3 * BLOCK + 5]


def test_rare_tokens_survive_a_large_vocabulary() -> None:
    """The last 10,000 tokens hold 1e-9 each: a float32 running sum near 1 could not see them."""
    size = 50_000
    probs = torch.full((1, size), 1e-9)
    probs[0, 0] = 1 - 1e-9 * (size - 1)
    cumulative = probs.double().cumsum(dim=-1)
    drawn = torch.tensor([1 - 5e-6], dtype=torch.float64)
    expected = torch.searchsorted(cumulative, drawn[:, None] * cumulative[:, -1:], right=True)
    assert abs(int(invert_cdf(probs, drawn)) - int(expected)) <= 1
    assert 44_000 < int(expected) < 46_000


def test_next_tokens_divides_by_the_temperature_and_returns_its_log_probability() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, -1.0]])
    tokens, logprobs = next_tokens(logits, 2.0, torch.tensor([0.5, 0.99], dtype=torch.float64))
    # softmax([0, 0.5, 1]) = [0.1863, 0.3072, 0.5065], softmax([1.5, 0, -0.5]) = [0.7361, 0.1643, 0.0996]
    assert tokens.tolist() == [2, 2]
    assert logprobs.exp().tolist() == pytest.approx([0.5065, 0.0996], abs=1e-4)


def test_greedy_takes_the_largest_logit_and_its_log_probability_at_temperature_one() -> None:
    tokens, logprobs = next_tokens(torch.tensor([[0.0, 3.0, 1.0]]), 0.0, None)
    assert tokens.tolist() == [1]
    assert float(logprobs) == pytest.approx(-np.log1p(np.exp(-3) + np.exp(-2)), abs=1e-6)


def test_greedy_tells_logits_apart_that_round_to_the_same_log_probability() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 5] = 1e-7
    assert torch.log_softmax(logits, dim=-1).unique().numel() == 1
    assert next_tokens(logits, 0.0, None)[0].tolist() == [5]


def test_sampling_without_uniforms_is_refused() -> None:
    with pytest.raises(ValueError, match="uniforms"):
        next_tokens(torch.zeros(1, 3), 1.0, None)
