"""What every fit shares: AdamW, the learning-rate schedule, clipping by norm, and a step of both supervised fits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from rlhf.errors import UserError
from rlhf.models.sharding import whole

FINAL_LR_SHARE = 0.1


def adamw(groups: Iterable[nn.Parameter] | list[dict[str, object]], lr: float, weight_decay: float) -> AdamW:
    """AdamW (Loshchilov and Hutter, 2019) with betas 0.9 and 0.999 and the fused kernel."""
    return AdamW(groups, lr=lr, weight_decay=weight_decay, eps=1e-8, fused=True)


def warmup_and_decay(step: int, steps: int, warmup: int) -> float:
    """Share of the peak learning rate at `step` of `steps`: linear rise, then linear fall to `FINAL_LR_SHARE`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    return 1 - (1 - FINAL_LR_SHARE) * min(1.0, done)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scales gradients down to `max_norm` and returns their norm before."""
    return float(whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))


def finite(number: Tensor | float, name: str, step: int, key: str) -> float:
    """`number` as a float; raises UserError where it is not finite, before a step can spoil the weights."""
    value = float(number)
    if value != value or value in (float("inf"), float("-inf")):
        raise UserError(f"{key}: the {name} is not finite at step {step}: lower {key}")
    return value


def take_step(
    optimiser: AdamW, loss: float, step: int, *, lr: float, max_grad_norm: float, key: str
) -> dict[str, float]:
    """Clips the gradients of `loss` and steps at the rate `lr`; returns loss, gradient norm and rate.

    Raises UserError that names the param `key` where loss or norm is not finite, with the weights as they were.
    """
    finite(loss, "loss", step, key)
    for group in optimiser.param_groups:
        group["lr"] = lr
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    norm = finite(clip_gradients(parameters, max_grad_norm), "gradient norm", step, key)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return {"loss": loss, "grad_norm": norm, "lr": lr}
