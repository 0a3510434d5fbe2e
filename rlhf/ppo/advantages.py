"""Generalised advantage estimation (Schulman et al., 2016, eq. 16) and whitening, over response actions only."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the response actions.

    A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t; behind the last response action value
    and advantage are 0, however the response ended.

    Args:
        rewards, values: (B, T-1) float32.
        mask: (B, T-1) True on response actions, contiguous in a row.

    Returns:
        advantages and returns = advantages + values, (B, T-1), 0 off the mask.
    """
    rewards, values = rewards * mask, values * mask
    advantages = torch.zeros_like(rewards)
    following_value = following_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following_value - values[:, t]
        advantages[:, t] = (delta + gamma * lam * following_advantage) * mask[:, t]
        following_value, following_advantage = values[:, t], advantages[:, t]
    return advantages, advantages + values


def moments(values: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean and population deviation over the mask, in float64 and two passes."""
    chosen = values[mask].double()
    mean = chosen.mean()
    return float(mean), float((chosen - mean).square().mean().sqrt())


def whiten(advantages: Tensor, mask: Tensor, mean: float, std: float) -> Tensor:
    """(A - mean) / sqrt(std^2 + 1e-8) on the mask, 0 off it."""
    return (advantages - mean) / (std**2 + 1e-8) ** 0.5 * mask


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask; 0 where the returns do not vary."""
    _, spread = moments(returns, mask)
    _, error = moments(returns - values, mask)
    return 1 - (error / spread) ** 2 if spread > 1e-8 else 0.0
