"""KL to the reference: estimators (Schulman, Approximating KL Divergence, 2020) and the coefficient's controller."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.params import Kl

LARGEST_ERROR = 0.2


class KlEstimates(NamedTuple):
    """Per-action estimates of KL(policy || reference) from samples of the policy, each in the shape of its inputs."""

    k1: Tensor
    k2: Tensor
    k3: Tensor


def estimates(logprobs: Tensor, ref_logprobs: Tensor) -> KlEstimates:
    """k1 = log r, k2 = (log r)^2 / 2, k3 = 1/r - 1 + log r with r = policy / reference.

    k1 and k3 are unbiased, k2 and k3 are never negative. Only k1 may stand in the reward: its sum is the KL of whole
    sequences, while a non-negative penalty pushes down tokens that already lost probability.
    """
    log_ratio = logprobs - ref_logprobs
    return KlEstimates(log_ratio, 0.5 * log_ratio.square(), torch.expm1(-log_ratio) + log_ratio)


def next_coef(coef: float, kl: float, sequences: int, settings: Kl) -> float:
    """The coefficient for the next iteration (Ziegler et al., 2019, section 2.2), once an iteration.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) sequences / horizon), `kl` in nats a sequence; a fixed one stays.
    """
    if settings.kind == "fixed":
        return coef
    error = min(max(kl / settings.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coef * (1 + error * sequences / settings.horizon)
