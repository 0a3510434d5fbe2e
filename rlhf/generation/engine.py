"""Batched sampling with a key-value cache: one engine for rollouts, preference sampling and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf.errors import UserError
from rlhf.generation.sampling import next_tokens
from rlhf.models.token_logprobs import output_logits


@dataclass(frozen=True)
class Sample:
    """One response: its tokens (the stop token included where it was reached), their log-probabilities, and whether
    it ended by itself rather than by the length limit."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Sequence[int],
    pad_id: int,
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
    uniforms: NDArray[np.float64] | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> list[Sample]:
    """One response a prompt, in the order of the prompts.

    Args:
        model: causal language model in evaluation mode.
        prompts: token ids, at least one each.
        stop_ids: tokens that end a response; they belong to it.
        pad_id: any valid token id, never attended to.
        max_new_tokens: length limit of a response.
        batch_size: rows decoded at once; changes results by rounding only.
        temperature: 0 is greedy.
        uniforms: (len(prompts), max_new_tokens), needed above temperature 0: row i, column t decides token t of
            response i, so that a response does not depend on its neighbours.
        on_rows: called with the number of rows that were completed.

    Raises UserError where a prompt and its response may not fit the model's context.
    """
    _check_context(model, prompts, max_new_tokens)
    samples: list[Sample | None] = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        drawn = None if uniforms is None else torch.from_numpy(uniforms[rows]).to(model.device)
        batch = _decode([prompts[r] for r in rows], model, set(stop_ids), pad_id, max_new_tokens, temperature, drawn)
        for row, sample in zip(rows, batch, strict=True):
            samples[row] = sample
        if on_rows:
            on_rows(len(rows))
    return [sample for sample in samples if sample is not None]


def _check_context(model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Positions behind the context window raise an error in some models and quietly spoil the rest."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(map(len, prompts), default=0)
    if context is not None and longest + max_new_tokens > context:
        raise UserError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's context of {context}: "
            "lower max_new_tokens or prompt.max_tokens"
        )


def _decode(
    prompts: Sequence[Sequence[int]],
    model: PreTrainedModel,
    stop_ids: set[int],
    pad_id: int,
    max_new_tokens: int,
    temperature: float,
    uniforms: Tensor | None,
) -> list[Sample]:
    """Decodes one batch; rows that are done leave it, so that the rest runs faster."""
    device = model.device
    tokens, attention, lengths = _pad_left(prompts, pad_id, device)
    cache = DynamicCache(config=model.config)
    positions = (torch.arange(-tokens.shape[1], 0, device=device) + lengths[:, None]).clamp_min(0)
    hidden = model.base_model(
        input_ids=tokens, attention_mask=attention, position_ids=positions, cache=cache, use_cache=True
    ).last_hidden_state[:, -1]
    active = torch.arange(len(prompts), device=device)
    chosen: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    finished = [False] * len(prompts)

    for step in range(max_new_tokens):
        drawn = None if uniforms is None else uniforms[active, step]
        new, scores = next_tokens(output_logits(model, hidden), temperature, drawn)
        rows, new_list = active.tolist(), new.tolist()
        for row, token, score in zip(rows, new_list, scores.tolist(), strict=True):
            chosen[row].append(token)
            logprobs[row].append(score)
            finished[row] = token in stop_ids
        if step + 1 == max_new_tokens:
            break
        going = [i for i, token in enumerate(new_list) if token not in stop_ids]
        if not going:
            break
        if len(going) < len(rows):
            keep = torch.tensor(going, device=device)
            active, new, attention = active[keep], new[keep], attention[keep]
            cache.batch_select_indices(keep)
        attention = torch.nn.functional.pad(attention, (0, 1), value=1)
        hidden = model.base_model(
            input_ids=new[:, None],
            attention_mask=attention,
            position_ids=(lengths[active] + step)[:, None],
            cache=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
    return [Sample(*row) for row in zip(chosen, logprobs, finished, strict=True)]


def _pad_left(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B, P), attention mask (B, P) and lengths (B,).

    On the left, so that no padding comes to stand between a prompt and its response: sliding windows and the cache
    count places, not positions.
    """
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths)
    tokens = torch.tensor([[*[pad_id] * (width - len(prompt)), *prompt] for prompt in prompts], device=device)
    sizes = torch.tensor(lengths, device=device)
    attention = (torch.arange(width, device=device) >= width - sizes[:, None]).long()
    return tokens, attention, sizes
