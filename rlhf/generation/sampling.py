"""From logits to the next token: greedy, or by inverting the distribution function at a given uniform number."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256


def next_tokens(logits: Tensor, temperature: float, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """The next token of each row and its log-probability.

    Args:
        logits: (B, V) float32.
        temperature: 0 takes the largest logit; otherwise logits are divided by it.
        uniforms: (B,) float64 in [0, 1); needed above temperature 0.

    Returns:
        tokens (B,) int64 and their log-probabilities (B,) float32, at the temperature (at 1 for greedy).
    """
    if temperature == 0:
        log_probs = torch.log_softmax(logits, dim=-1)
        tokens = logits.argmax(dim=-1)  # the logarithms round close logits to equal ones
    else:
        if uniforms is None:
            raise ValueError("sampling above temperature 0 needs uniforms")
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        tokens = invert_cdf(log_probs.exp(), uniforms)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def invert_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The smallest token whose cumulative probability exceeds `uniforms` (B,), for probs (B, V).

    Two levels, blocks and then tokens of one block, with running sums as products with a triangular matrix: a long
    float32 running sum loses the rare tokens, and `cumsum` has no deterministic kernel on GPUs.
    """
    rows, vocabulary = probs.shape
    padded = torch.nn.functional.pad(probs, (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)
    blocks = _running_sum(padded.sum(dim=-1, dtype=torch.float64))
    target = uniforms.to(torch.float64)[:, None] * blocks[:, -1:]
    block = (blocks <= target).sum(dim=-1, keepdim=True).clamp_max(blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp_min(0)), 0.0)
    inside = padded.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    offset = (_running_sum(inside.to(torch.float64)) <= target - before).sum(dim=-1, keepdim=True)
    # Rounding may leave the target a hair above the block's sum: then its last token with mass is meant.
    last = BLOCK - 1 - (inside > 0).flip(-1).to(torch.int8).argmax(dim=-1, keepdim=True)
    return (block * BLOCK + torch.minimum(offset, last)).squeeze(1)


def _running_sum(values: Tensor) -> Tensor:
    """Inclusive running sums of the rows of (B, N) float64."""
    size = values.shape[-1]
    return values @ torch.ones(size, size, dtype=values.dtype, device=values.device).triu()
