"""The clipped losses of PPO (Schulman et al., 2017), a value for each action; the caller sums and divides."""

from __future__ import annotations

import torch
from torch import Tensor


def policy_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs) (eq. 7); any shape.

    With `dual_clip` c > 1 the objective of an action with a negative advantage is at least c A (Ye et al., 2020,
    eq. 5): an action that became much more probable since the rollout does not pull without bound.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V_clip - R)^2) / 2 with V_clip within `clip` of the old value; any shape."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def clipped(logprobs: Tensor, old_logprobs: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """True where the ratio has left the trust interval."""
    ratio = torch.exp(logprobs - old_logprobs)
    return (ratio < 1 - clip_low) | (ratio > 1 + clip_high)


def importance_weights(logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_trainer / pi_sampler, cap): corrects for a sampler that rounds otherwise than the trainer; any shape.

    Truncated importance sampling (Ionides, 2008): a small bias for a bounded variance.
    """
    return torch.exp(logprobs - sampler_logprobs).clamp_max(cap)
