"""Generalised advantages by hand and against a float64 loop; whitening and explained variance by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf.ppo.advantages import explained_variance, gae, moments, whiten


def test_by_hand() -> None:
    """gamma 0.5, lambda 0.5, one row with response actions 1, 2 and 3.

    delta_3 = 4 - 1 = 3; delta_2 = 2 + 0.5 * 1 - 3 = -0.5; delta_1 = 1 + 0.5 * 3 - 2 = 0.5
    A_3 = 3; A_2 = -0.5 + 0.25 * 3 = 0.25; A_1 = 0.5 + 0.25 * 0.25 = 0.5625
    """
    rewards = torch.tensor([[7.0, 1.0, 2.0, 4.0, 7.0]])
    values = torch.tensor([[9.0, 2.0, 3.0, 1.0, 9.0]])
    mask = torch.tensor([[False, True, True, True, False]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0, 0.5625, 0.25, 3, 0]]
    assert returns.tolist() == [[0, 2.5625, 3.25, 4, 0]]


def test_a_single_response_action_is_terminal() -> None:
    mask = torch.tensor([[False, True, False]])
    advantages, returns = gae(torch.tensor([[0.0, 5, 0]]), torch.tensor([[1.0, 2, 3]]), mask, 0.9, 0.9)
    assert advantages.tolist() == [[0, 3, 0]]
    assert returns.tolist() == [[0, 5, 0]]


def by_definition(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, row by row in float64, over the row's response actions alone."""
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    for row in range(len(rewards)):
        places = mask[row].nonzero().flatten().tolist()
        r = [float(rewards[row, place]) for place in places]
        v = [float(values[row, place]) for place in places] + [0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        for t, place in enumerate(places):
            advantages[row, place] = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r)))
    return advantages


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_equals_the_definition(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 12, generator=generator)
    starts, ends = torch.tensor([0, 3, 11, 5]), torch.tensor([12, 9, 12, 6])
    places = torch.arange(12)
    mask = (places >= starts[:, None]) & (places < ends[:, None])
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    expected = by_definition(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns.double(), (expected + values.double()) * mask, atol=1e-5, rtol=1e-5)
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_with_lambda_and_gamma_one_the_return_is_the_reward_to_come() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.3, -0.7, 0.9]])
    _, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[7.0, 6.0, 4.0]]))


def test_the_arguments_are_left_alone() -> None:
    rewards, values = torch.ones(1, 3), torch.ones(1, 3)
    gae(rewards, values, torch.tensor([[False, True, True]]), 0.9, 0.9)
    assert rewards.equal(torch.ones(1, 3)) and values.equal(torch.ones(1, 3))


def test_moments_and_whitening_by_hand() -> None:
    """1, 2, 6 on the mask: mean 3, population variance (4 + 1 + 9) / 3 = 14/3."""
    advantages = torch.tensor([[1.0, 100.0, 2.0], [-100.0, 6.0, 0.0]])
    mask = torch.tensor([[True, False, True], [False, True, False]])
    mean, std = moments(advantages, mask)
    assert mean == 3
    assert std == pytest.approx((14 / 3) ** 0.5, rel=1e-12)
    expected = torch.tensor([[-2.0, 0, -1], [0, 3, 0]]) / (14 / 3) ** 0.5
    torch.testing.assert_close(whiten(advantages, mask, mean, std), expected)


def test_whitening_has_a_floor_under_the_variance() -> None:
    """(1e-5 - 0) / sqrt(0 + 1e-8) = 0.1."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert float(whiten(torch.tensor([[1e-5]]), mask, 0.0, 0.0)) == pytest.approx(0.1, rel=1e-5)


def test_moments_of_large_values_are_taken_in_float64() -> None:
    values = torch.tensor([[1e4, 1e4 + 0.25, 1e4 - 0.25]]).expand(2000, 3)
    _, std = moments(values, torch.ones_like(values, dtype=torch.bool))
    assert std == pytest.approx((2 * 0.0625 / 3) ** 0.5, rel=1e-9)


def test_explained_variance_by_hand() -> None:
    """Returns 1, 3 have variance 1; the errors 0, 1 have variance 1/4: 3/4 is explained."""
    mask = torch.tensor([[True, True, False]])
    returns, values = torch.tensor([[1.0, 3.0, 50.0]]), torch.tensor([[1.0, 2.0, -50.0]])
    assert explained_variance(values, returns, mask) == pytest.approx(0.75)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.zeros(1, 3), returns, mask) == 0
    assert explained_variance(values, torch.ones(1, 3), mask) == 0
