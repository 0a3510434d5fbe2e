"""The frame of DESIGN: right-padded tokens with explicit lengths, and the mask of response actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Prompts with their responses.

    Attributes:
        tokens: (B, T) token ids, right-padded; what stands behind a row's length is never read.
        prompt_lengths: (B,) tokens of the prompt, at least 1.
        lengths: (B,) tokens of prompt and response, above the prompt's.
    """

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def attention_mask(self) -> Tensor:
        """(B, T) 1 on real tokens."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (places < self.lengths[:, None]).long()

    @property
    def mask(self) -> Tensor:
        """(B, T-1) True exactly on response actions: action t produces token t+1, end-of-sequence included."""
        actions = torch.arange(self.tokens.shape[1] - 1, device=self.tokens.device)
        return (actions >= self.prompt_lengths[:, None] - 1) & (actions < self.lengths[:, None] - 1)

    @property
    def last_actions(self) -> Tensor:
        """(B,) index of each row's last response action."""
        return self.lengths - 2

    def select(self, rows: Tensor) -> TokenBatch:
        """The rows, cut to their own longest length."""
        lengths = self.lengths[rows]
        width = int(lengths.max())
        return TokenBatch(self.tokens[rows, :width], self.prompt_lengths[rows], lengths)

    def to(self, device: torch.device) -> TokenBatch:
        """The batch on another device."""
        return TokenBatch(self.tokens.to(device), self.prompt_lengths.to(device), self.lengths.to(device))


def pad(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int) -> TokenBatch:
    """A batch of prompts and responses; raises ValueError for a row without prompt or response."""
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    if not all(prompts) or not all(responses):
        raise ValueError("every row needs a prompt token and a response token")
    width = max(map(len, rows))
    return TokenBatch(
        tokens=torch.tensor([row + [pad_id] * (width - len(row)) for row in rows]),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        lengths=torch.tensor([len(row) for row in rows]),
    )


def micro_batches(rows: Tensor, size: int) -> Iterator[Tensor]:
    """`rows` in pieces of at most `size`."""
    yield from rows.split(size)


def by_length(batch: TokenBatch, rows: Tensor, size: int) -> Iterator[Tensor]:
    """`rows` of the batch in pieces of at most `size`, those of like lengths together: where a model computes padding,
    that is little. What fits one piece keeps its order."""
    if len(rows) > size:
        rows = rows[batch.lengths[rows].argsort(stable=True)]
    return micro_batches(rows, size)
