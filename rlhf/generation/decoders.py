"""What the engine asks of a model: logits of rows that start, grow by a token a step, and end.

Two answer: `LlamaDecoder`, our own for the Llama family on CPUs, and `TransformersDecoder`, which takes any model of
transformers on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf.errors import UserError
from rlhf.generation.llama import library, weights
from rlhf.generation.llama.decoder import LlamaDecoder
from rlhf.generation.sampling import Picker, from_logits
from rlhf.models.token_logprobs import output_logits
from rlhf.params import Sampler


class Decoder(Protocol):
    """Rows under way, in an order that the engine keeps as well.

    Attributes:
        refills: rows may be admitted while others are under way.
    """

    refills: bool

    @property
    def pick(self) -> Picker:
        """What takes tokens from logits."""

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Float32 (n, V) logits after the prompts; their rows stand behind those under way."""

    def step(self, tokens: Tensor) -> Tensor:
        """Float32 (n, V) logits after one more token (n,) in each row under way."""

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Ends all rows but these (ascending); returns them in the order in which they stand from now on."""


def make_decoder(
    sampler: Sampler,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    rows: int,
    new_tokens: int,
    pad_id: int,
) -> Decoder:
    """A decoder for `rows` of the prompts at once; `auto` takes ours where it can run the model, and says so where not.

    Raises UserError where `native` cannot.
    """
    if sampler == "transformers":
        return TransformersDecoder(model, pad_id)
    if not (reason := weights.why_not(model)):
        return LlamaDecoder(model, prompts, rows, new_tokens)
    if sampler == "native":
        raise UserError(
            f"generation.sampler=native cannot run this model: {reason}: set generation.sampler=transformers"
        )
    _say_once(f"generation: transformers samples, not the faster native sampler: {reason}")
    return TransformersDecoder(model, pad_id)


def kernels(sampler: Sampler, device: torch.device) -> str:
    """What may compute beside torch: part of what decides a sample; empty for nothing."""
    return library.description() if sampler != "transformers" and device.type == "cpu" else ""


@lru_cache
def _say_once(line: str) -> None:
    print(line, flush=True)


class TransformersDecoder:
    """A whole batch at a time, with transformers' own cache."""

    refills = False
    pick = staticmethod(from_logits)

    def __init__(self, model: PreTrainedModel, pad_id: int) -> None:
        self._model = model
        self._pad_id = pad_id

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """As `Decoder` has it; none may be under way."""
        tokens, self._attention, self._lengths = _pad_left(prompts, self._pad_id, self._model.device)
        self._cache = DynamicCache(config=self._model.config)
        width = tokens.shape[1]
        return self._forward(tokens, torch.arange(-width, 0, device=tokens.device) + self._lengths[:, None])

    def step(self, tokens: Tensor) -> Tensor:
        """As `Decoder` has it."""
        self._attention = torch.nn.functional.pad(self._attention, (0, 1), value=1)
        self._lengths = self._lengths + 1
        return self._forward(tokens[:, None], self._lengths[:, None] - 1)

    def keep(self, rows: Sequence[int]) -> list[int]:
        """As `Decoder` has it; the order stays."""
        kept = torch.tensor(rows, dtype=torch.int64, device=self._model.device)
        self._attention, self._lengths = self._attention[kept], self._lengths[kept]
        if rows:
            self._cache.batch_select_indices(kept)
        return list(rows)

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = self._model.base_model(
            input_ids=tokens,
            attention_mask=self._attention,
            position_ids=positions.clamp_min(0),
            cache=self._cache,
            use_cache=True,
        ).last_hidden_state
        return output_logits(self._model, hidden[:, -1])


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
