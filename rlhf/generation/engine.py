"""Batched sampling with a key-value cache: one engine for rollouts, preference sampling and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf.errors import UserError
from rlhf.generation.sampling import Draw, next_tokens
from rlhf.models.token_logprobs import output_logits


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        tokens: with what ended it, the stop token or the stop string, where that was reached.
        logprobs: the tokens' log-probabilities under the sampler.
        finished: it ended by itself rather than by the length limit.
        kept_mass: mean over the tokens of the mass that `top_k` and `top_p` kept; 1 where nothing is cut.
        kept: the ids that were kept at each token, ascending; None without `exact`, and without truncation.
    """

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    kept_mass: float = 1.0
    kept: list[list[int]] | None = None


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
    top_k: int = 0,
    top_p: float = 1.0,
    exact: bool = False,
    uniforms: NDArray[np.float64] | None = None,
    stop: Callable[[Sequence[int]], bool] | None = None,
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
        top_k, top_p, exact: which tokens are sampled from, and log-probabilities of which distribution: see
            `next_tokens`.
        uniforms: (len(prompts), max_new_tokens), needed above temperature 0: row i, column t decides token t of
            response i, so that a response does not depend on its neighbours.
        stop: called with a response's tokens after each; True ends the response like a stop token.
        on_rows: called with the number of rows that were completed.

    Raises UserError where a prompt and its response may not fit the model's context.
    """
    _check_context(model, prompts, max_new_tokens)
    stops = set(stop_ids)

    def ended(tokens: Sequence[int]) -> bool:
        return tokens[-1] in stops or (stop is not None and stop(tokens))

    sampler = partial(next_tokens, temperature=temperature, top_k=top_k, top_p=top_p, exact=exact)
    samples: list[Sample | None] = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        drawn = None if uniforms is None else torch.from_numpy(uniforms[rows]).to(model.device)
        batch = _decode([prompts[row] for row in rows], model, sampler, ended, pad_id, max_new_tokens, drawn)
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
    sampler: Callable[..., Draw],
    ended: Callable[[Sequence[int]], bool],
    pad_id: int,
    max_new_tokens: int,
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
    masses: list[list[float]] = [[] for _ in prompts]
    kept: list[list[list[int]]] = [[] for _ in prompts]
    finished = [False] * len(prompts)

    for step in range(max_new_tokens):
        draw = sampler(output_logits(model, hidden), uniforms=None if uniforms is None else uniforms[active, step])
        rows = active.tolist()
        numbers = (column.tolist() for column in (draw.tokens, draw.logprobs, draw.kept_mass))
        for row, token, logprob, mass, ids in zip(rows, *numbers, draw.kept or [[]] * len(rows), strict=True):
            chosen[row].append(token)
            logprobs[row].append(logprob)
            masses[row].append(mass)
            kept[row].append(ids)
            finished[row] = ended(chosen[row])
        going = [place for place, row in enumerate(rows) if not finished[row]]
        if step + 1 == max_new_tokens or not going:
            break
        new = draw.tokens
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
    return [
        Sample(tokens, scores, done, kept_mass=sum(mass) / len(mass), kept=ids if any(ids) else None)
        for tokens, scores, done, mass, ids in zip(chosen, logprobs, finished, masses, kept, strict=True)
    ]


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
