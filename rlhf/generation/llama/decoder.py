"""The decoder for the Llama family on CPUs: prompts without padding, rows that come and go, one token a step.

Beside transformers it fuses and packs the weights, keeps keys and values in place, computes what all prompts begin with
once, and reads only the places that a row has filled. The residual stream stays in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from rlhf.generation.llama import weights
from rlhf.generation.llama.kernels import operations
from rlhf.generation.llama.operations import Cache, heads
from rlhf.generation.sampling import Picker

State = tuple[Tensor, Tensor]  # a prompt's keys and values in a layer, (tokens, kv heads, size) each


class LlamaDecoder:
    """Rows under way; see `rlhf.generation.decoders.Decoder`."""

    refills = True

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], rows: int, new_tokens: int) -> None:
        """Takes the model's weights as they are, for `rows` of `prompts` at once and that many new tokens each."""
        capacity = max(map(len, prompts)) + new_tokens
        self._operations = operations(weights.shape(model), model.dtype)
        self._weights = w = weights.read(model, capacity, self._operations.linear)
        self._cache = Cache(len(w.layers), w.shape, rows, capacity, w.dtype)
        self._rows = 0
        self._shared = 0
        nothing = torch.empty(0, w.shape.kv_heads, w.shape.size, dtype=w.dtype)
        self._start = [(nothing, nothing)] * len(w.layers)
        prefix = _common_start(prompts)
        if prefix:
            self._read([prefix], self._keep_start)
            self._shared = len(prefix)

    @property
    def pick(self) -> Picker:
        """What takes tokens from logits."""
        return self._operations.pick

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Float32 (n, V) logits after the prompts; their rows stand behind those under way."""
        own = [prompt[self._shared :] for prompt in prompts]
        lengths = list(map(len, own))
        hidden = self._read(own, self._keep_rows)
        ends = torch.tensor(lengths)
        self._cache.lengths[self._rows : self._rows + len(prompts)] = ends + self._shared
        self._rows += len(prompts)
        return self._weights.head(hidden[ends.cumsum(dim=0) - 1])

    def step(self, tokens: Tensor) -> Tensor:
        """Float32 (n, V) logits after one more token (n,) in each row under way."""

        def attention(layer: int, qkv: Tensor) -> Tensor:
            return self._operations.attend(qkv, layer, self._cache, self._weights)

        hidden = self._forward(tokens, attention)
        self._cache.lengths[: self._rows] += 1
        return self._weights.head(hidden)

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Ends all rows but these (ascending); returns them in the order in which they stand from now on."""
        order = list(range(len(rows)))
        moved = [row for row in rows if row >= len(rows)]
        holes = sorted(set(order).difference(rows))
        for hole, row in zip(holes, moved, strict=True):
            self._cache.move(row, hole)
            order[hole] = row
        self._rows = len(rows)
        return order

    def _keep_start(self, layer: int, states: Sequence[State]) -> None:
        (self._start[layer],) = states

    def _keep_rows(self, layer: int, states: Sequence[State]) -> None:
        for row, (keys, values) in enumerate(states, start=self._rows):
            self._cache.put(row, layer, keys, values)

    def _read(self, prompts: Sequence[Sequence[int]], keep: Callable[[int, Sequence[State]], None]) -> Tensor:
        """The final hidden states (N, D) of all tokens, prompt after prompt, each read behind the shared beginning.

        Layer by layer `keep` gets the prompts' states, the beginning included.
        """
        w = self._weights
        lengths = list(map(len, prompts))
        positions = torch.cat([torch.arange(length) for length in lengths]) + self._shared

        def attention(layer: int, qkv: Tensor) -> Tensor:
            queries, keys, values = (x.to(w.dtype) for x in heads(qkv, w.layers[layer], positions, w))
            pieces = zip(keys.split(lengths), values.split(lengths), strict=True)
            first_keys, first_values = self._start[layer]
            states = [(torch.cat([first_keys, k]), torch.cat([first_values, v])) for k, v in pieces]
            keep(layer, states)
            asked = zip(queries.split(lengths), states, strict=True)
            return torch.cat([_causal(q, k, v, w.scale) for q, (k, v) in asked])

        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        return self._forward(tokens, attention)

    def _forward(self, tokens: Tensor, attention: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Final hidden states (N, D) of N tokens, of which `attention` gives what they read in a layer."""
        w, normalise = self._weights, self._operations.normalise
        stream = w.embedding[tokens].float()
        added = None
        for number, layer in enumerate(w.layers):
            qkv = layer.qkv(normalise(stream, added, layer.input_norm, w))
            read = layer.out(attention(number, qkv))
            gate_up = layer.gate_up(normalise(stream, read, layer.mlp_norm, w))
            added = layer.down(self._operations.swiglu(gate_up))
        return normalise(stream, added, w.norm, w)


def _common_start(prompts: Sequence[Sequence[int]]) -> list[int]:
    """What all prompts begin with, short of the last token of the shortest."""
    places = range(min(map(len, prompts)) - 1)
    same = takewhile(lambda place: len({prompt[place] for prompt in prompts}) == 1, places)
    return [prompts[0][place] for place in same]


def _causal(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """(N, heads * size) what N queries (N, heads, size) read; the last N of the keys (M, kv heads, size) are theirs."""
    size, length = len(queries), len(keys)
    mask = torch.ones(size, length, dtype=torch.bool).tril(length - size)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (queries, keys, values))
    read = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return read[0].transpose(0, 1).flatten(1)
