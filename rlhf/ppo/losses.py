"""The clipped losses of PPO (Schulman et al., 2017), a value for each action; the caller sums and divides."""

from __future__ import annotations

import torch
from torch import Tensor


def policy_losses(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """-min(r A, clip(r, 1 - clip, 1 + clip) A) with r = exp(logprobs - old_logprobs) (eq. 7); any shape."""
    ratio = torch.exp(logprobs - old_logprobs)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V_clip - R)^2) / 2 with V_clip within `clip` of the old value; any shape."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def clipped(logprobs: Tensor, old_logprobs: Tensor, clip: float) -> Tensor:
    """True where the ratio has left the trust interval."""
    return (torch.exp(logprobs - old_logprobs) - 1).abs() > clip
