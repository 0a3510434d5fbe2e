"""Log-probabilities of chosen tokens without ever holding a (tokens, vocabulary) float32 log-softmax."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

CHUNK = 512


def output_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Float32 logits (..., V) of final hidden states (..., D), as the model's own forward would give them."""
    head = model.get_output_embeddings()
    logits = head(hidden.to(head.weight.dtype)).float()
    config = model.config.get_text_config()
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / scaling
    return logits


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
    pieces = []
    for i in range(0, len(targets), chunk):
        rows = slice(i, i + chunk)
        inputs = model, hidden[rows], targets[rows], temperature, None if kept is None else kept[rows]
        pieces.append(
            checkpoint(_chunk_logprobs, *inputs, use_reentrant=False)
            if torch.is_grad_enabled()
            else _chunk_logprobs(*inputs)
        )
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


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
