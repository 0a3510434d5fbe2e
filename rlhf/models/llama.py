"""The Llama family, and its trunk over a batch's real tokens alone: padding costs nothing, rows lie one behind another.

The trunk computes what transformers does with less between the matrix products: a normalised token is rounded once for
all layers that read it, attention is exactly as long as its row, and of norm, SwiGLU and rotation the backward pass
computes again what is cheap, so that an update needs half the memory for activations.
"""

from __future__ import annotations

from itertools import starmap
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlhf.models.batches import TokenBatch
from rlhf.models.sharding import is_sharded

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""RMSNorm, rotary positions, grouped-query attention, SwiGLU; with or without biases, query and key norms, tied
embeddings."""


def why_not_family(model: PreTrainedModel) -> str | None:
    """Why a model is not computed as one of the family, in a few words; None where it is."""
    config = model.config
    if config.model_type not in FAMILY:
        return f"its architecture is {config.model_type}, not one of {', '.join(FAMILY)}"
    if model.device.type != "cpu":
        return f"it is on {model.device.type}"
    if is_sharded(model):
        return "each process has a part of it"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "its attention has a sliding window"
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None:
        return "its attention has a sliding window"
    return None


def packed_hidden(model: PreTrainedModel, batch: TokenBatch, dtype: torch.dtype) -> Tensor:
    """Float32 (N, D) final hidden states of the batch's N real tokens, row after row; matrix products in `dtype`, which
    the caller's autocast has as well."""
    trunk: Any = model.base_model
    real = batch.attention_mask.bool()
    lengths = batch.lengths.tolist()
    stream = trunk.embed_tokens(batch.tokens[real]).float()
    positions = torch.cat([torch.arange(length) for length in lengths])
    cos, sin = (table[0, :, None] for table in trunk.rotary_emb(stream, positions[None]))
    for layer in trunk.layers:
        inputs = layer, stream, lengths, cos, sin, dtype
        again = layer.training and layer.gradient_checkpointing and torch.is_grad_enabled()
        stream = checkpoint(_layer, *inputs, use_reentrant=False) if again else _layer(*inputs)
    hidden: Tensor = _RmsNorm.apply(stream, trunk.norm.weight, trunk.norm.variance_epsilon, torch.float32)
    return hidden


def _layer(layer: Any, stream: Tensor, lengths: list[int], cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """The residual stream (N, D) behind one decoder layer."""
    first, second, mlp = layer.input_layernorm, layer.post_attention_layernorm, layer.mlp
    x = _RmsNorm.apply(stream, first.weight, first.variance_epsilon, dtype)
    stream = stream + _attention(layer.self_attn, x, lengths, cos, sin)
    x = _RmsNorm.apply(stream, second.weight, second.variance_epsilon, dtype)
    return stream + mlp.down_proj(_SwiGlu.apply(mlp.gate_proj(x), mlp.up_proj(x)))


def _attention(attention: Any, x: Tensor, lengths: list[int], cos: Tensor, sin: Tensor) -> Tensor:
    """(N, D) what the tokens (N, D) read, each in its own row."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    queries, keys, values = (project(x).unflatten(-1, (-1, attention.head_dim)) for project in projections)
    if hasattr(attention, "q_norm"):
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    turned = _Rotation.apply(queries, cos, sin), _Rotation.apply(keys, cos, sin), values

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.scaling, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    rows = zip(*(tensor.split(lengths) for tensor in turned), strict=True)
    output: Tensor = attention.o_proj(torch.cat(list(starmap(read, rows))))
    return output


class _RmsNorm(torch.autograd.Function):
    """Root mean square norm (Zhang and Sennrich, 2019, eq. 4) of float32 (N, D), in `dtype`.

    With u = x / rms(x) and p the gradient of the output times the weight: dx = (p - u mean(p u)) / rms(x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        factors = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(epsilon).rsqrt_()[:, None]
        ctx.save_for_backward(x, weight, factors)
        return (x * factors).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, factors = ctx.saved_tensors
        unit, gradient = x * factors, gradients[0].float()
        pull = gradient * weight
        along = torch.linalg.vecdot(pull, unit).div_(x.shape[-1])[:, None]
        of_weight = (gradient * unit).sum(dim=0) if ctx.needs_input_grad[1] else None
        return pull.addcmul_(unit, along, value=-1).mul_(factors), of_weight, None, None


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up (Shazeer, 2020, eq. 5), of two tensors (N, F)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradients[0] * up, gate), silu(gate).mul_(gradients[0])


class _Rotation(torch.autograd.Function):
    """Rotary positions (Su et al., 2021, eq. 34) of (N, heads, size), the halves of a head being the pairs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    exact = x.float()
    out = exact * cos
    out[..., :half].addcmul_(exact[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(exact[..., :half], sin[..., half:])
    return out.to(x.dtype)
