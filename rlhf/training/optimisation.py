"""What every fit shares: AdamW, the learning-rate schedule, clipping by norm."""

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
