"""Supervised fine-tuning on demonstrations: cross-entropy on the response alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rlhf.models.actor_critic import action_logprobs, final_hidden
from rlhf.models.batches import TokenBatch, micro_batches, pad
from rlhf.params import Finetune
from rlhf.streams import Purpose, shuffled_slice
from rlhf.training.optimisation import adamw, take_step, warmup_and_decay


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to imitate, as tokens; the response ends in end-of-sequence."""

    prompt: list[int]
    response: list[int]


def finetune(
    model: PreTrainedModel,
    demonstrations: Sequence[Demonstration],
    settings: Finetune,
    *,
    seed: int,
    pad_id: int,
    dtype: torch.dtype,
    on_step: Callable[[int, dict[str, float]], None],
) -> None:
    """Trains `model` in place; `on_step` gets each step's number and its loss (nats a token), norm and rate."""
    model.eval()  # dropout off: the demonstrations are seen about once
    optimiser = adamw(model.parameters(), settings.lr, settings.weight_decay)
    for step in range(settings.steps):
        start = step * settings.batch_size
        rows = shuffled_slice(seed, Purpose.SHUFFLE_DEMONSTRATIONS, start, settings.batch_size, len(demonstrations))
        chosen = [demonstrations[row] for row in rows]
        batch = pad([d.prompt for d in chosen], [d.response for d in chosen], pad_id).to(model.device)
        lr = settings.lr * warmup_and_decay(step, settings.steps, settings.warmup_steps)
        loss = accumulate(model, batch, settings.micro_batch_size, dtype)
        numbers = take_step(optimiser, loss, step, lr=lr, max_grad_norm=settings.max_grad_norm, key="sft.finetune.lr")
        on_step(step, numbers)


def accumulate(model: PreTrainedModel, batch: TokenBatch, micro_batch_size: int, dtype: torch.dtype) -> float:
    """Adds the gradient of the mean cross-entropy over the batch's response tokens; returns that mean."""
    tokens = batch.mask.sum()
    total = 0.0
    for rows in micro_batches(torch.arange(len(batch), device=tokens.device), micro_batch_size):
        part = batch.select(rows)
        logprobs = action_logprobs(model, final_hidden(model, part, dtype), part, 1.0, dtype).logprobs
        loss = -logprobs.sum() / tokens
        loss.backward()
        total += float(loss.detach())
    return total
