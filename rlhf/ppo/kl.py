"""KL to the reference: estimators (Schulman, Approximating KL Divergence, 2020) and the coefficient's controller."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlhf.params import Kl
from rlhf.params.ppo import LARGEST_ERROR

KlForm = Literal["k1", "k2", "k3", "ratio_k1", "ratio_k3"]


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


def kl_losses(form: KlForm, logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-action KL for the policy's loss, where gradients flow through `logprobs` alone; any shape.

    With w = exp(logprobs - old_logprobs): `ratio_k1` = w k1 and `ratio_k3` = w k3, differentiated through both factors,
    have the reverse KL's gradient in each state, on-policy and off; its effect on later states is left out. `k2` has
    it on-policy alone. `k3` (GRPO's, Shao et al., 2024, eq. 4) has the forward KL's. `k1` by itself has a gradient of
    mean zero: params refuse it.
    """
    kl = estimates(logprobs, ref_logprobs)
    if form == "k2":
        return kl.k2
    if form == "k3":
        return kl.k3
    return torch.exp(logprobs - old_logprobs) * (kl.k1 if form == "ratio_k1" else kl.k3)


def next_coef(coef: float, kl: float, sequences: int, settings: Kl) -> float:
    """The coefficient for the next iteration (Ziegler et al., 2019, section 2.2), once an iteration.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) sequences / horizon), `kl` in nats a sequence; a fixed one stays.
    """
    if settings.kind == "fixed":
        return coef
    error = min(max(kl / settings.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coef * (1 + error * sequences / settings.horizon)
