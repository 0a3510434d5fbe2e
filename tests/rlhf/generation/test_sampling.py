"""The sampler: its distribution function against float64 search, truncation against loops, and frequencies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from rlhf.generation.sampling import BLOCK, invert_cdf, most_probable, next_tokens
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
    tokens, logprobs, *_ = next_tokens(logits, 2.0, torch.tensor([0.5, 0.99], dtype=torch.float64))
    # softmax([0, 0.5, 1]) = [0.1863, 0.3072, 0.5065], softmax([1.5, 0, -0.5]) = [0.7361, 0.1643, 0.0996]
    assert tokens.tolist() == [2, 2]
    assert logprobs.exp().tolist() == pytest.approx([0.5065, 0.0996], abs=1e-4)


def test_greedy_takes_the_largest_logit_and_its_log_probability_at_temperature_one() -> None:
    """Whatever the truncation: nothing is cut."""
    tokens, logprobs, kept_mass, kept = next_tokens(torch.tensor([[0.0, 3.0, 1.0]]), 0.0, None, 2, 0.5, exact=True)
    assert tokens.tolist() == [1]
    assert float(logprobs) == pytest.approx(-np.log1p(np.exp(-3) + np.exp(-2)), abs=1e-6)
    assert kept_mass.tolist() == [1.0] and kept is None


def test_greedy_tells_logits_apart_that_round_to_the_same_log_probability() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 5] = 1e-7
    assert torch.log_softmax(logits, dim=-1).unique().numel() == 1
    assert next_tokens(logits, 0.0, None)[0].tolist() == [5]


def test_sampling_without_uniforms_is_refused() -> None:
    with pytest.raises(ValueError, match="uniforms"):
        next_tokens(torch.zeros(1, 3), 1.0, None)


TRUNCATIONS = [(0, 1.0), (20, 1.0), (0, 0.8), (50, 0.7)]
CUTTING = TRUNCATIONS[1:]


def kept_by_loops(logits: list[float], top_k: int, top_p: float) -> list[int]:
    """Token by token from the most probable one on, in float64; among equal ones the lower id comes first."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or None]
    total = math.fsum(math.exp(logits[token]) for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        kept.append(token)
        mass += math.exp(logits[token]) / total
        if top_p < 1 and mass >= top_p:
            break
    return sorted(kept)


def random_logits(rows: int, size: int, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(rows, size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize(("top_k", "top_p"), TRUNCATIONS)
def test_frequencies_follow_the_kept_probabilities(top_k: int, top_p: float) -> None:
    size, rows, temperature = 300, 20_000, 0.7
    logits = random_logits(1, size, spread=0.5)
    kept = kept_by_loops((logits[0].double() / temperature).tolist(), top_k, top_p)
    draw = next_tokens(logits.expand(rows, -1), temperature, draws(rows), top_k, top_p)
    counts = np.bincount(draw.tokens.numpy(), minlength=size)
    masses = np.exp(logits[0, kept].double().numpy() / temperature)
    expected = rows * masses / masses.sum()
    assert counts.sum() == counts[kept].sum() and expected.min() > 5
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    assert statistic < scipy.stats.chi2.ppf(0.999, len(kept) - 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("top_k", "top_p"), [*CUTTING, (1, 1.0), (0, 1e-9), (257, 0.95)])
def test_the_kept_tokens_are_those_of_a_loop(top_k: int, top_p: float, ties: bool, size: int) -> None:
    logits = random_logits(20, size)
    if ties:
        logits = logits.round()
    keep = most_probable(logits, top_k, top_p)
    expected = [kept_by_loops(row, top_k, top_p) for row in logits.double().tolist()]
    assert [row.nonzero().flatten().tolist() for row in keep] == expected


def test_kept_tokens_by_hand() -> None:
    """Probabilities 0.1, 0.2, 0.4, 0.3: after top-k 3 they are 0.222, 0.444, 0.333 of what is left."""
    logits = torch.tensor([[0.1, 0.2, 0.4, 0.3]]).log()

    def kept(top_k: int, top_p: float) -> list[int]:
        return most_probable(logits, top_k, top_p)[0].nonzero().flatten().tolist()

    assert kept(2, 1.0) == [2, 3]
    assert kept(0, 0.39) == [2] and kept(0, 0.41) == [2, 3] and kept(0, 0.71) == [1, 2, 3]
    assert kept(3, 0.43) == [2] and kept(3, 0.45) == [2, 3] == kept(3, 0.77) and kept(3, 0.79) == [1, 2, 3]
    assert kept(0, 0.0) == kept(1, 0.9) == [2]


def test_a_nucleus_that_reaches_its_mass_exactly_takes_no_further_token() -> None:
    assert most_probable(torch.zeros(1, 4), 0, 0.5).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(("top_k", "top_p"), CUTTING)
def test_log_probabilities_of_the_full_and_of_the_kept_distribution(top_k: int, top_p: float) -> None:
    logits, temperature = random_logits(50, 600), 0.9
    full = next_tokens(logits, temperature, draws(50), top_k, top_p)
    exact = next_tokens(logits, temperature, draws(50), top_k, top_p, exact=True)
    assert exact.tokens.equal(full.tokens) and full.kept is None and exact.kept is not None
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    for row, token in enumerate(full.tokens.tolist()):
        kept = kept_by_loops((logits[row].double() / temperature).tolist(), top_k, top_p)
        mass = float(probs[row, kept].sum())
        assert exact.kept[row] == kept and token in kept
        assert float(full.logprobs[row]) == pytest.approx(math.log(probs[row, token]), abs=1e-5)
        assert float(exact.logprobs[row]) == pytest.approx(math.log(probs[row, token] / mass), abs=1e-5)
        assert float(full.kept_mass[row]) == float(exact.kept_mass[row]) == pytest.approx(mass, abs=1e-6)
        assert mass < 0.95


def test_a_single_kept_token_is_certain() -> None:
    logits = random_logits(30, 600)
    draw = next_tokens(logits, 1.0, draws(30), top_k=1, exact=True)
    assert draw.tokens.equal(logits.argmax(dim=-1)) and not draw.logprobs.any()
    assert draw.kept == draw.tokens[:, None].tolist()


@pytest.mark.parametrize("top_k", [0, 300, 301])
def test_without_truncation_nothing_is_sorted_and_nothing_changes(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.generation.sampling.most_probable", None)
    logits = random_logits(100, 300)
    tokens, logprobs, kept_mass, kept = next_tokens(logits, 0.7, draws(100), top_k, 1.0, exact=True)
    log_probs = torch.log_softmax(logits / 0.7, dim=-1)
    assert tokens.equal(invert_cdf(log_probs.exp(), draws(100)))
    assert logprobs.equal(log_probs.gather(1, tokens[:, None])[:, 0])
    assert kept_mass.eq(1).all() and kept is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch lacks deterministic kernels on GPUs only")
def test_every_kernel_is_deterministic() -> None:
    logits, drawn = random_logits(50, 600), draws(50)
    torch.use_deterministic_algorithms(True)
    try:
        draw = next_tokens(logits.cuda(), 0.7, drawn.cuda(), 50, 0.7, exact=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert draw.kept == next_tokens(logits, 0.7, drawn, 50, 0.7, exact=True).kept
