"""Log-probabilities of chosen tokens without ever holding a (tokens, vocabulary) float32 log-softmax.

Two ways to the same values: where the output layer is a plain product and all of the distribution counts, `_OfProduct`
with its gradient in closed form; else chunks under activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

CHUNK = 256


SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def output_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Float32 logits (..., V) of final hidden states (..., D), as the model's own forward would give them."""
    head = model.get_output_embeddings()
    logits = head(hidden.to(head.weight.dtype)).float()
    config = model.config.get_text_config()
    cap, scale, scaling = (getattr(config, name, None) for name in SCALES)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    if scale is not None:
        logits = logits * scale
    if scaling is not None:
        logits = logits / scaling
    return logits


def _plain_weight(model: PreTrainedModel) -> Tensor | None:
    """The output layer's weight (V, D), where its product with the hidden states is the logits; None elsewhere."""
    head = cast(nn.Module, model.get_output_embeddings())
    config = model.config.get_text_config()
    biased = getattr(head, "bias", None) is not None
    bent = any(getattr(config, name, None) is not None for name in SCALES)
    return head.weight if type(head) is nn.Linear and not biased and not bent else None


def token_logprobs(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, both float32 (N,).

    Args:
        hidden: (N, D) final hidden states at the positions before the targets.
        targets: (N,) token ids.
        temperature: divides the logits.
        chunk: rows whose logits exist at once; each chunk's are computed again in the backward pass.
        kept: (N, K) different token ids a row, padded with -1, over which the distribution is renormalised; None for
            the whole vocabulary.

    Raises ValueError where a target is not among its row's kept ids.
    """
    if kept is not None and not (kept == targets[:, None]).any(dim=-1).all():
        raise ValueError("every target must be among the kept ids of its row")
    if kept is None and (weight := _plain_weight(model)) is not None:
        logprobs, entropies = _OfProduct.apply(hidden, weight, targets, temperature, chunk)
        return logprobs, entropies
    pieces = []
    for i in range(0, len(targets), chunk):
        rows = slice(i, i + chunk)
        inputs = model, hidden[rows], targets[rows], temperature, None if kept is None else kept[rows]
        pieces.append(
            checkpoint(_chunk_logprobs, *inputs, use_reentrant=False)
            if torch.is_grad_enabled()
            else _chunk_logprobs(*inputs)
        )
    columns = zip(*pieces, strict=True)
    logprobs, entropies = map(torch.cat, columns)
    return logprobs, entropies


def _chunk_logprobs(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    full = output_logits(model, hidden) / temperature
    logits = full if kept is None else full.gather(-1, kept.long().clamp_min(0))
    masked = logits if kept is None else logits.masked_fill(kept < 0, -torch.inf)
    log_normaliser = torch.logsumexp(masked, dim=-1)
    chosen = full.gather(-1, targets[:, None]).squeeze(-1)
    probs = torch.exp(masked - log_normaliser[:, None])
    # Not `masked`: 0 times infinity is no number.
    return chosen - log_normaliser, log_normaliser - (probs * logits).sum(dim=-1)


class _OfProduct(torch.autograd.Function):
    """Log-probabilities (N,) and entropies (N,) of logits = hidden (N, D) times weight (V, D) transposed.

    With p the probabilities of a row, its entropy H and its target t, the gradients of the logits are
    d logprob / d logit_j = [j = t] - p_j and dH / d logit_j = -p_j (log p_j + H). Only a chunk's logits exist at once;
    the backward pass computes them again. Under autocast the products are in its precision, all else in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):
            inputs, factor = hidden.to(dtype), weight.to(dtype).t()
            pieces = [_statistics(x @ factor, t, temperature) for x, t in _chunks(chunk, inputs, targets)]
        logprobs, entropies, normalisers = (torch.cat(column) for column in zip(*pieces, strict=True))
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies)
        ctx.settings = dtype, temperature, chunk
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalisers, entropies = ctx.saved_tensors
        dtype, temperature, chunk = ctx.settings
        inputs, factor = hidden.to(dtype), weight.to(dtype)
        of_hidden, of_weight = [], torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for x, *rows in _chunks(chunk, inputs, targets, normalisers, entropies, *gradients):
            of_logits = _logit_gradients(x @ factor.t(), temperature, *rows).to(dtype)
            of_hidden.append(of_logits @ factor)
            if of_weight is not None:
                _add_product(of_weight, of_logits.t(), x)
        return torch.cat(of_hidden).to(hidden.dtype), of_weight, None, None, None


def _chunks(size: int, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The columns in pieces of `size` rows."""
    return zip(*(column.split(size) for column in columns), strict=True)


def _statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 log-probabilities, entropies and logarithms of the normaliser, (N,) each, of logits (N, V)."""
    scaled = _scaled(logits, temperature)
    top = scaled.amax(dim=-1)
    shifted = scaled.sub_(top[:, None])
    chosen = shifted.gather(-1, targets[:, None]).squeeze(-1)
    masses = shifted.exp()
    total = masses.sum(dim=-1)
    logarithm = total.log()
    return chosen - logarithm, logarithm - torch.linalg.vecdot(masses, shifted) / total, logarithm + top


def _logit_gradients(
    logits: Tensor,
    temperature: float,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor,
    of_entropies: Tensor,
) -> Tensor:
    """Float32 (N, V) gradients of the logits, from those of log-probabilities and entropies (N,)."""
    log_probs = _scaled(logits, temperature).sub_(normalisers[:, None])
    gradients = log_probs.exp()
    if of_entropies.any():
        pull = log_probs.add_(entropies[:, None]).mul_(of_entropies[:, None]).add_(of_logprobs[:, None])
        gradients.mul_(pull).neg_()
    else:
        gradients.mul_(-of_logprobs[:, None])
    gradients.scatter_add_(-1, targets[:, None], of_logprobs[:, None])
    return gradients if temperature == 1 else gradients.div_(temperature)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """The logits, which nobody else holds, in float32 and divided by the temperature."""
    return logits.float() if temperature == 1 else logits.float().div_(temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left (V, N) times right (N, D) to the total (V, D), which may be of a higher precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
