"""A Llama-family model's weights as the decoder wants them: fused, and packed for the processor's matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models.llama import why_not_family

STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not change with the length


class Linear(Protocol):
    """Linear layers with the same input as one product."""

    def __call__(self, x: Tensor) -> Tensor:
        """(N, D), in the weight's type, to (N, D')."""


class MakeLinear(Protocol):
    """Makes a product out of a copy of the layers' weights."""

    def __call__(self, *layers: nn.Linear, dtype: torch.dtype) -> Linear:
        """`dtype`: of the results."""


class PackedLinear:
    """The product by oneDNN, the weight laid out once and for all; without oneDNN with the fused weight as it is."""

    def __init__(self, *layers: nn.Linear, dtype: torch.dtype) -> None:
        weight, self._bias = fused(layers)
        self._packed = torch.backends.mkldnn.is_available() and weight.device.type == "cpu"
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        """As `Linear` has it."""
        if self._packed:
            out = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            out = nn.functional.linear(x, self._weight, self._bias)
        return out.to(self._dtype)


def fused(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights (D', D) and the biases (D') of layers with the same input, copied one behind the other."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if biases and len(biases) < len(layers):
        raise ValueError("either all of the fused layers have a bias or none has")
    return weight, torch.cat(biases) if biases else None


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
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    """A whole model.

    Attributes:
        head: the output layer, final hidden states to float32 logits.
        cos, sin: float32 (positions, head size) of the rotary embedding.
        scale: what a product of query and key is multiplied with.
    """

    shape: Shape
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Linear
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


def shape(model: PreTrainedModel) -> Shape:
    """The heads of a model's attention."""
    config, trunk = model.config, cast(Any, model.base_model)
    return Shape(config.num_attention_heads, config.num_key_value_heads, trunk.layers[0].self_attn.head_dim)


@torch.no_grad()
def read(model: PreTrainedModel, positions: int, linear: MakeLinear = PackedLinear) -> Weights:
    """The weights of a model as they are now, a copy, for that many positions; `linear` makes the products."""
    trunk: Any = model.base_model
    config = model.config
    cos, sin = trunk.rotary_emb(torch.empty(0, dtype=torch.float32), torch.arange(positions)[None])
    return Weights(
        shape=shape(model),
        embedding=trunk.embed_tokens.weight.detach(),
        layers=[_layer(layer, partial(linear, dtype=model.dtype)) for layer in trunk.layers],
        norm=trunk.norm.weight.detach().float(),
        head=linear(cast(nn.Linear, model.get_output_embeddings()), dtype=torch.float32),
        epsilon=config.rms_norm_eps,
        cos=cos[0],
        sin=sin[0],
        scale=trunk.layers[0].self_attn.scaling,
    )


def _layer(layer: Any, linear: Callable[..., Linear]) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        input_norm=layer.input_layernorm.weight.detach().float(),
        qkv=linear(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=None if query_norm is None else query_norm.weight.detach().float(),
        key_norm=None if key_norm is None else key_norm.weight.detach().float(),
        out=linear(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach().float(),
        gate_up=linear(mlp.gate_proj, mlp.up_proj),
        down=linear(mlp.down_proj),
    )
