"""What a decoding step does between its matrix products, in PyTorch: the reference for kernels.py, and its stand-in."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from rlhf.generation.llama.weights import Layer, Linear, PackedLinear, Shape, Weights
from rlhf.generation.sampling import from_logits

BLOCK = 64  # places that the kernels read at once


class Cache:
    """Keys and values of the rows under way, for all layers; the capacity is rounded up to whole blocks.

    Attributes:
        keys: a layer each, (rows, kv heads, blocks, head size, BLOCK): transposed, as the scores are computed.
        values: a layer each, (rows, kv heads, capacity, head size).
        lengths: (rows,) int64 places in use.
    """

    def __init__(self, layers: int, shape: Shape, rows: int, capacity: int, dtype: torch.dtype) -> None:
        blocks = -(-capacity // BLOCK)
        self.keys = [torch.zeros(rows, shape.kv_heads, blocks, shape.size, BLOCK, dtype=dtype) for _ in range(layers)]
        places = rows, shape.kv_heads, blocks * BLOCK, shape.size
        self.values = [torch.zeros(places, dtype=dtype) for _ in range(layers)]
        self.lengths = torch.zeros(rows, dtype=torch.int64)

    def put(self, row: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fills a row's first places with keys and values (places, kv heads, size)."""
        padded = torch.nn.functional.pad(keys, (0, 0, 0, 0, 0, -len(keys) % BLOCK)).unflatten(0, (-1, BLOCK))
        self.keys[layer][row, :, : len(padded)] = padded.permute(2, 0, 3, 1)
        self.values[layer][row, :, : len(values)] = values.transpose(0, 1)

    def move(self, source: int, target: int) -> None:
        """Puts one row in another's place."""
        for tensor in (*self.keys, *self.values, self.lengths):
            tensor[target] = tensor[source]


class Operations(Protocol):
    """A layer's products, three steps between them, each over N tokens, and what follows the last layer."""

    def linear(self, *layers: nn.Linear, dtype: torch.dtype) -> Linear:
        """As `MakeLinear` has it."""

    def normalise(self, stream: Tensor, added: Tensor | None, weight: Tensor, weights: Weights) -> Tensor:
        """Adds (N, D) to the float32 residual stream (N, D) in place; returns the stream's RMS norm, (N, D)."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, (N, F) of (N, 2F)."""

    def attend(self, qkv: Tensor, number: int, cache: Cache, weights: Weights) -> Tensor:
        """(N, heads * size) what the next token of the first N rows reads in layer `number`.

        Writes its key and value behind the row's places; `lengths` counts it once all layers are through.
        """

    def pick(self, logits: Tensor, temperature: float, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `rlhf.generation.sampling.from_logits` has it."""


class TorchOperations:
    """The operations in PyTorch."""

    linear = PackedLinear

    def normalise(self, stream: Tensor, added: Tensor | None, weight: Tensor, weights: Weights) -> Tensor:
        """As `Operations` has it."""
        if added is not None:
            stream += added
        return rms_norm(stream, stream.shape[-1:], weight, weights.epsilon).to(weights.dtype)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """As `Operations` has it."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (silu(gate) * up).to(gate_up.dtype)

    def attend(self, qkv: Tensor, number: int, cache: Cache, weights: Weights) -> Tensor:
        """As `Operations` has it."""
        places = cache.lengths[: len(qkv)]
        queries, keys, values = heads(qkv, weights.layers[number], places, weights)
        rows = torch.arange(len(qkv))
        cache.keys[number][rows, :, places // BLOCK, :, places % BLOCK] = keys.to(weights.dtype)
        cache.values[number][rows, :, places] = values.to(weights.dtype)
        blocks = int(places.max()) // BLOCK + 1
        seen = cache.keys[number][: len(qkv), :, :blocks].float()
        grouped = queries.view(len(qkv), weights.shape.kv_heads, 1, weights.shape.group, weights.shape.size)
        scores = (grouped @ seen).transpose(2, 3).flatten(3) * weights.scale
        unused = torch.arange(blocks * BLOCK) > places[:, None]
        shares = scores.masked_fill(unused[:, None, None], -torch.inf).softmax(dim=-1)
        read = shares @ cache.values[number][: len(qkv), :, : blocks * BLOCK].float()
        return read.reshape(len(qkv), -1).to(weights.dtype)

    def pick(self, logits: Tensor, temperature: float, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `Operations` has it."""
        return from_logits(logits, temperature, uniforms)


def heads(qkv: Tensor, layer: Layer, positions: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 queries (N, heads, size), keys and values (N, kv heads, size), queries and keys at their positions."""
    shape = weights.shape
    parts = qkv.float().view(len(qkv), -1, shape.size)
    queries, keys, values = parts.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    if layer.query_norm is not None:
        queries = rms_norm(queries, queries.shape[-1:], layer.query_norm, weights.epsilon)
    if layer.key_norm is not None:
        keys = rms_norm(keys, keys.shape[-1:], layer.key_norm, weights.epsilon)
    cos, sin = weights.cos[positions][:, None], weights.sin[positions][:, None]
    return _rotated(queries, cos, sin), _rotated(keys, cos, sin), values


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, the two halves of a head's width being the pairs (Su et al., RoFormer, 2021)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
