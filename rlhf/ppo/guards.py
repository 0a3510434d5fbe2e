"""What makes an iteration worthless or dangerous, said in the iteration itself and not hours later."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhf.params import Ppo
from rlhf.ppo.metrics import Row

LOG_RATIO_TOLERANCE = 1e-4
"""Largest |log ratio| of the first minibatch, whose weights are those of the rollout, in float32."""
FIRST_KL_TOLERANCE = 2e-3
"""The same minibatch's approximate KL to the rollout's policy, nats a token, in any other dtype: there a single token's
log ratio is as large as a logit's rounding (0.1 and more), while a pass that really differs moves the mean."""
CUT_MASS_TOLERANCE = 0.01


@dataclass(frozen=True)
class Alarm:
    """A named fault of an iteration; a fatal one ends training, before its update."""

    name: str
    text: str
    fatal: bool = False


def of_rollout(row: Row, settings: Ppo) -> list[Alarm]:
    """Alarms about the samples, before the policy is updated on them."""
    alarms = []
    if row["score_std"] == 0:
        alarms.append(Alarm("equal_scores", "all scores are equal, the policy cannot learn from them"))
    if row["cut_off"] == 1:
        alarms.append(Alarm("cut_off", "every response was cut off: raise ppo.sampling.max_new_tokens"))
    if settings.truncation == "full" and row["cut_mass"] > CUT_MASS_TOLERANCE:
        text = f"top-p and top-k cut off {100 * row['cut_mass']:.1f} % of the probability that the loss counts on"
        alarms.append(Alarm("cut_mass", f"{text}: take ppo.truncation=exact, or cut less"))
    limit = settings.kl.limit
    if limit is not None and not row["kl_sequence"] <= limit:  # nan as well
        text = f"the KL of {row['kl_sequence']:.3g} nats a sequence exceeds ppo.kl.limit={limit:g}"
        alarms.append(Alarm("kl", f"{text}: raise ppo.kl.coef or lower ppo.lr", fatal=True))
    return alarms


def of_update(row: Row, dtype: torch.dtype) -> list[Alarm]:
    """Alarms about the update's first minibatch, before its step."""
    key, tolerance = "first_log_ratio", LOG_RATIO_TOLERANCE
    if dtype != torch.float32:
        key, tolerance = "first_kl", FIRST_KL_TOLERANCE
    if row[key] <= tolerance:
        return []
    text = f"the first minibatch's {key.removeprefix('first_').replace('_', ' ')} is {row[key]:.2g}, not 0"
    return [Alarm("ratio", f"{text}: the policy's forward pass is not repeatable")]
