"""Batched sampling with a key-value cache: one engine for rollouts, preference sampling and evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.generation.decoders import make_decoder
from rlhf.generation.sampling import Draw, next_tokens
from rlhf.params import Sampler

REFILL_BELOW = 0.9  # the share of rows under way up to which new prompts join them: each joining reads all weights once


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


@dataclass
class _Row:
    """A response under way."""

    number: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masses: list[float] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    finished: bool = False

    def sample(self) -> Sample:
        """The response, now that it is complete."""
        mass = sum(self.masses) / len(self.masses)
        kept = self.kept if any(self.kept) else None
        return Sample(self.tokens, self.logprobs, self.finished, kept_mass=mass, kept=kept)


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
    sampler: Sampler = "transformers",
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
        sampler: which decoder runs the model; see `make_decoder`.

    Raises UserError where a prompt and its response may not fit the model's context, or the decoder cannot run it.
    """
    if not prompts:
        return []
    _check_context(model, prompts, max_new_tokens)
    stops = set(stop_ids)

    def over(row: _Row) -> bool:
        row.finished = row.tokens[-1] in stops or (stop is not None and stop(row.tokens))
        return row.finished or len(row.tokens) == max_new_tokens

    rows = [_Row(number) for number in range(len(prompts))]
    waiting = deque(sorted(rows, key=lambda row: len(prompts[row.number])))
    active: list[_Row] = []
    decoder = make_decoder(sampler, model, prompts, min(batch_size, len(prompts)), max_new_tokens, pad_id)
    draw = partial(next_tokens, temperature=temperature, top_k=top_k, top_p=top_p, exact=exact, pick=decoder.pick)
    while waiting or active:
        if waiting and (not active or (decoder.refills and len(active) <= batch_size * REFILL_BELOW)):
            growing = [waiting.popleft() for _ in range(min(batch_size - len(active), len(waiting)))]
            logits = decoder.admit([prompts[row.number] for row in growing])
            active = active + growing
        else:
            growing = active
            logits = decoder.step(torch.tensor([row.tokens[-1] for row in active], device=model.device))
        _grow(growing, draw(logits, uniforms=_next_uniforms(uniforms, growing, model.device)))
        done = {row.number for row in growing if over(row)}
        if done:
            going = [place for place, row in enumerate(active) if row.number not in done]
            active = [active[place] for place in decoder.keep(going)]
            if on_rows:
                on_rows(len(done))
    return [row.sample() for row in rows]


def _check_context(model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Positions behind the context window raise an error in some models and quietly spoil the rest."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(map(len, prompts), default=0)
    if context is not None and longest + max_new_tokens > context:
        raise UserError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's context of {context}: "
            "lower max_new_tokens or prompt.max_tokens"
        )


def _next_uniforms(uniforms: NDArray[np.float64] | None, rows: Sequence[_Row], device: torch.device) -> Tensor | None:
    """(n,) the numbers that decide each row's next token."""
    if uniforms is None:
        return None
    return torch.from_numpy(uniforms[[row.number for row in rows], [len(row.tokens) for row in rows]]).to(device)


def _grow(rows: Sequence[_Row], draw: Draw) -> None:
    """Adds a token to each row."""
    columns = draw.tokens.tolist(), draw.logprobs.tolist(), draw.kept_mass.tolist(), draw.kept or [[]] * len(rows)
    for row, token, logprob, mass, ids in zip(rows, *columns, strict=True):
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.masses.append(mass)
        row.kept.append(ids)
