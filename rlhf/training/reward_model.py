"""Fitting the reward model to preferences: the Bradley-Terry likelihood (Bradley, Terry, 1952; InstructGPT eq. 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.models.batches import micro_batches, pad
from rlhf.models.reward_model import raw_scores
from rlhf.params import RewardModel
from rlhf.streams import Purpose, permutation
from rlhf.training.optimisation import adamw, take_step, warmup_and_decay


@dataclass(frozen=True)
class TokenPair:
    """A prompt with the better and the worse response, as tokens."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def pair_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected), (N,)."""
    return -torch.nn.functional.logsigmoid(chosen - rejected)


def fit(
    model: PreTrainedModel,
    questions: Sequence[Sequence[TokenPair]],
    settings: RewardModel,
    *,
    seed: int,
    pad_id: int,
    dtype: torch.dtype,
    on_step: Callable[[int, dict[str, float]], None],
) -> None:
    """Trains `model` in place. All pairs of a question stand in one batch, as InstructGPT has it: spread over several,
    each answer would be seen several times an epoch and the model overfits."""
    optimiser = adamw(model.parameters(), settings.lr, settings.weight_decay)
    starts = range(0, len(questions), settings.batch_size)
    steps = settings.epochs * len(starts)
    step = 0
    for epoch in range(settings.epochs):
        order = permutation(seed, Purpose.SHUFFLE_PAIRS, epoch, len(questions))
        for start in starts:
            pairs = [pair for q in order[start : start + settings.batch_size] for pair in questions[q]]
            lr = settings.lr * warmup_and_decay(step, steps, settings.warmup_steps)
            loss, accuracy = _accumulate(model, pairs, settings.micro_batch_size, pad_id, dtype)
            numbers = take_step(
                optimiser, loss, step, lr=lr, max_grad_norm=settings.max_grad_norm, key="reward_model.lr"
            )
            on_step(step, numbers | {"pair_accuracy": accuracy})
            step += 1


def _accumulate(
    model: PreTrainedModel, pairs: Sequence[TokenPair], micro_batch_size: int, pad_id: int, dtype: torch.dtype
) -> tuple[float, float]:
    """Adds the gradient of the mean pair loss; returns that mean and the share of pairs in the right order."""
    total, right = 0.0, 0
    for rows in micro_batches(torch.arange(len(pairs)), micro_batch_size):
        chosen, rejected = score_pairs(model, [pairs[row] for row in rows], pad_id, dtype)
        loss = pair_losses(chosen, rejected).sum() / len(pairs)
        loss.backward()
        total += float(loss.detach())
        right += int((chosen > rejected).sum())
    return total, right / len(pairs)


def score_pairs(
    model: PreTrainedModel, pairs: Sequence[TokenPair], pad_id: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Raw scores (N,) of the chosen and of the rejected responses, in one forward pass."""
    prompts = [pair.prompt for pair in pairs] * 2
    responses = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    scores = raw_scores(model, pad(prompts, responses, pad_id).to(model.device), dtype)
    return scores[: len(pairs)], scores[len(pairs) :]


@torch.no_grad()
def score_all(
    model: PreTrainedModel, pairs: Sequence[TokenPair], micro_batch_size: int, pad_id: int, dtype: torch.dtype
) -> list[tuple[float, float]]:
    """Raw scores of each pair's chosen and rejected response, without a gradient."""
    scores: list[tuple[float, float]] = []
    for start in range(0, len(pairs), micro_batch_size):
        chosen, rejected = score_pairs(model, pairs[start : start + micro_batch_size], pad_id, dtype)
        scores += zip(chosen.tolist(), rejected.tolist(), strict=True)
    return scores
