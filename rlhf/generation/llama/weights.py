"""A Llama-family model's weights as the decoder wants them: fused, and packed for the processor's matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models.llama import why_not_family

STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not change with the length


class PackedLinear:
    """Linear layers with the same input as one product, its weight laid out by oneDNN once and for all.

    Without oneDNN the fused weight is used as it is.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        if biases and len(biases) < len(layers):
            raise ValueError("either all of the fused layers have a bias or none has")
        self._bias = torch.cat(biases) if biases else None
        self._packed = torch.backends.mkldnn.is_available() and weight.device.type == "cpu"
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """(N, D) to (N, D'), in the weight's type."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return nn.functional.linear(x, self._weight, self._bias)


@dataclass(frozen=True)
class Shape:
    """Heads of the attention, and how many keys and values they share; `size` is a head's width."""

    heads: int
    kv_heads: int
    size: int

    @property
    def group(self) -> int:
        """Query heads that read the same keys."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Layer:
    """One decoder layer. `qkv` gives queries, keys and values side by side, `gate_up` the two halves of SwiGLU."""

    input_norm: Tensor
    qkv: PackedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class Weights:
    """A whole model.

    Attributes:
        head: the output layer, final hidden states to logits.
        cos, sin: float32 (positions, head size) of the rotary embedding.
        scale: what a product of query and key is multiplied with.
    """

    shape: Shape
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: PackedLinear
    epsilon: float
    cos: Tensor
    sin: Tensor
    scale: float

    @property
    def dtype(self) -> torch.dtype:
        """The type of the matrix products."""
        return self.embedding.dtype


def why_not(model: PreTrainedModel) -> str | None:
    """Why the decoder cannot run this model, in a few words; None where it can."""
    if (reason := why_not_family(model)) is not None:
        return reason
    if (rope := model.config.rope_parameters["rope_type"]) not in STATIC_ROPES:
        return f"its rotary embedding is {rope}"
    trunk: Any = model.base_model
    linears = [model.get_output_embeddings()]
    linears += [m for layer in trunk.layers for m in layer.modules() if hasattr(m, "weight") and m.weight.ndim == 2]
    if any(type(module) is not nn.Linear for module in linears):
        return "its layers are wrapped"
    return None


@torch.no_grad()
def read(model: PreTrainedModel, positions: int) -> Weights:
    """The weights of a model as they are now, a copy, for that many positions."""
    trunk: Any = model.base_model
    config = model.config
    attention = trunk.layers[0].self_attn
    shape = Shape(config.num_attention_heads, config.num_key_value_heads, attention.head_dim)
    cos, sin = trunk.rotary_emb(torch.empty(0, dtype=torch.float32), torch.arange(positions)[None])
    return Weights(
        shape=shape,
        embedding=trunk.embed_tokens.weight.detach(),
        layers=[_layer(layer) for layer in trunk.layers],
        norm=trunk.norm.weight.detach().float(),
        head=PackedLinear(cast(nn.Linear, model.get_output_embeddings())),
        epsilon=config.rms_norm_eps,
        cos=cos[0],
        sin=sin[0],
        scale=attention.scaling,
    )


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        input_norm=layer.input_layernorm.weight.detach().float(),
        qkv=PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=None if query_norm is None else query_norm.weight.detach().float(),
        key_norm=None if key_norm is None else key_norm.weight.detach().float(),
        out=PackedLinear(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach().float(),
        gate_up=PackedLinear(mlp.gate_proj, mlp.up_proj),
        down=PackedLinear(mlp.down_proj),
    )
