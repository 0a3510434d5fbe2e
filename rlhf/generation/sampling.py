"""From logits to the next token: greedy, or by inverting the distribution function at a given uniform number.

Sampling can be cut to the most probable tokens: to the `top_k` of them (Fan et al., Hierarchical Neural Story
Generation, 2018), or to the nucleus of mass `top_p` (Holtzman et al., The Curious Case of Neural Text Degeneration,
2020), or to both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256

Picker = Callable[[Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
"""Takes tokens from logits: see `from_logits`."""


class Draw(NamedTuple):
    """The next token of each of B rows.

    Attributes:
        tokens: (B,) int64.
        logprobs: (B,) float32 log-probabilities of the tokens.
        kept_mass: (B,) float32 share of the full distribution that the kept tokens hold, in (0, 1].
        kept: the ids of each row's kept tokens, ascending; None without `exact`, and without truncation.
    """

    tokens: Tensor
    logprobs: Tensor
    kept_mass: Tensor
    kept: list[list[int]] | None


def from_logits(logits: Tensor, temperature: float, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """The next tokens (B,) and their log-probabilities, of the whole distribution; arguments as in `next_tokens`."""
    if temperature == 0:
        # Of the logits: their logarithms round close ones to equal ones.
        tokens, log_probs = logits.argmax(dim=-1), torch.log_softmax(logits, dim=-1)
    else:
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        tokens = invert_cdf(log_probs.exp(), needed(uniforms))
    return tokens, _of(tokens, log_probs)


def next_tokens(
    logits: Tensor,
    temperature: float,
    uniforms: Tensor | None,
    top_k: int = 0,
    top_p: float = 1.0,
    exact: bool = False,
    pick: Picker = from_logits,
) -> Draw:
    """The next token of each row and its log-probability.

    Args:
        logits: (B, V) float32.
        temperature: 0 takes the largest logit and cuts nothing; otherwise logits are divided by it.
        uniforms: (B,) float64 in [0, 1); needed above temperature 0.
        top_k: how many tokens are kept, 0 for all.
        top_p: mass of the nucleus, a share of what `top_k` leaves; 1 for all.
        exact: log-probabilities are renormalised over the kept tokens, whose ids are returned; otherwise they are
            those of the full distribution.
        pick: what takes the tokens where nothing is cut.

    Returns:
        Log-probabilities at the temperature, at 1 for greedy.
    """
    if temperature == 0 or not (0 < top_k < logits.shape[-1] or top_p < 1):
        tokens, logprobs = pick(logits, temperature, uniforms)
        return Draw(tokens, logprobs, kept_mass=torch.ones_like(logprobs), kept=None)
    scaled = logits / temperature
    keep = most_probable(scaled, top_k, top_p)
    log_probs = torch.log_softmax(scaled, dim=-1)
    kept_log_probs = torch.log_softmax(scaled.masked_fill(~keep, -torch.inf), dim=-1)
    tokens = invert_cdf(kept_log_probs.exp(), needed(uniforms))
    probs = log_probs.exp()
    kept_mass = (probs * keep).sum(dim=-1, dtype=torch.float64) / probs.sum(dim=-1, dtype=torch.float64)
    logprobs = _of(tokens, kept_log_probs if exact else log_probs)
    return Draw(tokens, logprobs, kept_mass.float(), kept=_ids(keep) if exact else None)


def most_probable(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """(B, V) True on the tokens that are kept: the `top_k` most probable, and of these the fewest most probable ones
    whose mass reaches the share `top_p`; at least one. Among equal logits the lower ids are kept.

    Args:
        logits: (B, V) float32, divided by the temperature.
        top_k: 0 for all.
        top_p: 1 for all.
    """
    cut = 0 < top_k < logits.shape[-1]
    ranked = (logits.topk(top_k) if cut else logits.sort(descending=True)).values
    size = torch.full_like(logits[:, :1], ranked.shape[1], dtype=torch.int64)
    if top_p < 1:
        shares = torch.full_like(logits[:, 0], top_p, dtype=torch.float64)
        size = _search(torch.softmax(ranked, dim=-1), shares, torch.lt)[:, None] + 1
    smallest = ranked.gather(1, size - 1)
    above, equal = logits > smallest, logits == smallest
    return above | (equal & (equal.cumsum(dim=-1) <= size - above.sum(dim=-1, keepdim=True)))


def invert_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The smallest token whose cumulative probability exceeds `uniforms` (B,), for probs (B, V) of any sum."""
    return _search(probs, uniforms, torch.le)


def _search(probs: Tensor, shares: Tensor, before: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(B,) the first place whose running sum is not `before` the share (B,) of the row's whole sum.

    Two levels, blocks and then tokens of one block, with running sums as products with a triangular matrix: a long
    float32 running sum loses the rare tokens, and `cumsum` of floats has no deterministic kernel on GPUs.
    """
    rows, vocabulary = probs.shape
    padded = torch.nn.functional.pad(probs, (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)
    blocks = _running_sum(padded.sum(dim=-1, dtype=torch.float64))
    target = shares.to(torch.float64)[:, None] * blocks[:, -1:]
    block = before(blocks, target).sum(dim=-1, keepdim=True).clamp_max(blocks.shape[1] - 1)
    passed = torch.where(block > 0, blocks.gather(1, (block - 1).clamp_min(0)), 0.0)
    inside = padded.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    offset = before(_running_sum(inside.to(torch.float64)), target - passed).sum(dim=-1, keepdim=True)
    # Rounding may leave the target a hair above the block's sum: then its last token with mass is meant.
    last = BLOCK - 1 - (inside > 0).flip(-1).to(torch.int8).argmax(dim=-1, keepdim=True)
    return (block * BLOCK + torch.minimum(offset, last)).squeeze(1)


def _running_sum(values: Tensor) -> Tensor:
    """Inclusive running sums of the rows of (B, N) float64."""
    size = values.shape[-1]
    return values @ torch.ones(size, size, dtype=values.dtype, device=values.device).triu()


def _of(tokens: Tensor, log_probs: Tensor) -> Tensor:
    """(B,) the tokens' own out of (B, V)."""
    return log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def needed(uniforms: Tensor | None) -> Tensor:
    """The uniforms; raises ValueError where there are none."""
    if uniforms is None:
        raise ValueError("sampling above temperature 0 needs uniforms")
    return uniforms


def _ids(keep: Tensor) -> list[list[int]]:
    """The places of the True in each row of (B, V)."""
    ids = keep.nonzero()[:, 1].cpu()
    return [row.tolist() for row in ids.split(keep.sum(dim=-1).tolist())]
