"""From responses to rewards: the scorers, the task score, and its place among the actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.data.answers import Method, has_single_final_answer, is_correct
from rlhf.data.gsm8k import Problem
from rlhf.models.batches import TokenBatch, micro_batches
from rlhf.models.reward_model import Normalisation, raw_scores
from rlhf.params import Reward


class Scorer(Protocol):
    """Scores responses: the only thing that PPO knows of a reward."""

    def __call__(self, problems: Sequence[Problem], texts: Sequence[str], batch: TokenBatch, /) -> Tensor:
        """Float32 (B,) scores of the responses `texts`, whose tokens are in `batch`."""


class VerifierScorer:
    """1 for the right final number, else 0, and a small bonus for exactly one well-formed final answer."""

    def __init__(self, method: Method, format_bonus: float) -> None:
        self._method, self._bonus = method, format_bonus

    def __call__(self, problems: Sequence[Problem], texts: Sequence[str], batch: TokenBatch) -> Tensor:
        scores = [
            float(is_correct(text, problem.gold, self._method)) + self._bonus * has_single_final_answer(text)
            for problem, text in zip(problems, texts, strict=True)
        ]
        return torch.tensor(scores, device=batch.tokens.device)


class RewardModelScorer:
    """The reward model's score at the last real token, normalised over finished SFT samples."""

    def __init__(
        self, model: PreTrainedModel, normalisation: Normalisation, micro_batch_size: int, dtype: torch.dtype
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._normalisation, self._micro_batch_size, self._dtype = normalisation, micro_batch_size, dtype

    @torch.no_grad()
    def __call__(self, _problems: Sequence[Problem], _texts: Sequence[str], batch: TokenBatch) -> Tensor:
        rows = torch.arange(len(batch), device=batch.tokens.device)
        parts = micro_batches(rows, self._micro_batch_size)
        raw = torch.cat([raw_scores(self._model, batch.select(part), self._dtype) for part in parts])
        return (raw - self._normalisation.mean) / self._normalisation.std


class MixtureScorer:
    """A weighted sum of scorers."""

    def __init__(self, parts: Sequence[tuple[float, Scorer]]) -> None:
        self._parts = [(weight, scorer) for weight, scorer in parts if weight]

    def __call__(self, problems: Sequence[Problem], texts: Sequence[str], batch: TokenBatch) -> Tensor:
        return torch.stack([weight * scorer(problems, texts, batch) for weight, scorer in self._parts]).sum(dim=0)


def task_scores(scores: Tensor, finished: Tensor, settings: Reward) -> Tensor:
    """(B,) the clipped score of a finished response, `cut_off_score` for one that the length limit cut off."""
    return torch.where(finished, scores.clamp(-settings.clip, settings.clip), settings.cut_off_score)


def whiten_scores(scores: Tensor) -> Tensor:
    """(B,) scores over their population deviation, with their mean kept; as they are where none differs.

    The mean is kept because it is what tells a good iteration from a bad one (Ziegler et al., 2019).
    """
    mean, std = scores.mean(), deviation(scores)
    return (scores - mean) / std + mean if std else scores


def deviation(scores: Tensor) -> float:
    """The population deviation of scores (B,): exactly 0 where none differs, whatever their mean rounds to."""
    return 0.0 if float(scores.max()) == float(scores.min()) else float(scores.std(correction=0))


def token_rewards(scores: Tensor, kl: Tensor, batch: TokenBatch, coef: float) -> Tensor:
    """(B, T-1) -coef k1 on every response action, and the score (B,) on the last one."""
    rewards = -coef * kl * batch.mask
    rows = torch.arange(len(batch), device=rewards.device)
    rewards[rows, batch.last_actions] += scores
    return rewards
