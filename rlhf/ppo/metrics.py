"""What an iteration's rollouts and update say, as one row of numbers; every mean is over response tokens or rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf.data.answers import is_correct
from rlhf.params import Params, Ppo
from rlhf.ppo.advantages import explained_variance
from rlhf.ppo.kl import estimates
from rlhf.ppo.rewards import deviation
from rlhf.ppo.rollout import Experience, Rollout
from rlhf.ppo.update import UpdateStats

Row = dict[str, float]


def of_rollout(params: Params, rollout: Rollout, experience: Experience, scores: Tensor) -> Row:
    """What the samples are worth, before the update; `scores` (B,) are the task scores before whitening."""
    mask = experience.batch.mask
    tokens, sequences = int(mask.sum()), len(rollout.texts)
    correct = [
        is_correct(text, problem.gold, params.verifier.method)
        for text, problem in zip(rollout.texts, rollout.problems, strict=True)
        if problem.gold is not None
    ]
    kl = estimates(experience.logprobs, experience.ref_logprobs)
    k1, k2, k3 = (float(k.sum(dtype=torch.float64)) for k in kl)
    return {
        "score": float(scores.mean()),
        "score_std": deviation(scores),
        "accuracy": sum(correct) / len(correct) if correct else math.nan,
        "kl_token": k1 / tokens,
        "kl_sequence": k1 / sequences,
        "kl_k2": k2 / tokens,
        "kl_k3": k3 / tokens,
        "kl_k2_sequence": k2 / sequences,
        "kl_k3_sequence": k3 / sequences,
        "explained_variance": explained_variance(experience.values, experience.returns, mask),
        "response_length": tokens / sequences,
        "cut_off": 1 - float(rollout.finished.float().mean()),
        "mismatch": float((rollout.sampler_logprobs - experience.logprobs).abs().sum()) / tokens,
        "importance": float(experience.weights.sum()) / tokens,
        "cut_mass": rollout.cut_mass,
    }


def of_first_minibatch(seen: UpdateStats, settings: Ppo) -> Row:
    """How far the update's forward pass is from the rollout's, before any step: 0 up to rounding.

    Where the old log-probabilities are the sampler's, that is the mismatch of sampler and trainer.
    """
    row = {"first_log_ratio": seen.log_ratio, "first_kl": seen.means()["approx_kl"]}
    if settings.old_logprobs == "sampler":
        row["mismatch"] = seen.log_ratios / max(1, seen.tokens)
    return row


def of_update(stats: UpdateStats) -> Row:
    """What the update did: its losses, how far it went, and how many steps it took."""
    return stats.means() | {"grad_norm": stats.grad_norm, "ptx_loss": stats.ptx_loss, "steps": float(stats.steps)}
