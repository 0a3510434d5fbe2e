"""The least time that the machine's peaks allow: what no implementation of the same model and work can go below.

A matrix of D x D' costs a token 2 D D' operations; attention costs it 4 for every token that it looks at, head and
channel. Only tokens that are no padding count, and the output layer only where the work needs a distribution. Decoding
also has to read the weights and the cached keys and values at every step, over the copy rate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BYTES = {"float32": 4, "bfloat16": 2}


class Peaks(NamedTuple):
    """What the machine reached in the same run.

    Attributes:
        float32, bfloat16: operations a second in products of many rows, as a long pass has them.
        step_float32, step_bfloat16: the same in products of as many rows as are decoded at once.
        copy: bytes a second.
    """

    float32: float
    bfloat16: float
    step_float32: float
    step_bfloat16: float
    copy: float

    def passing(self, dtype: str) -> float:
        """Operations a second of a pass over whole sequences, in that precision."""
        return {"float32": self.float32, "bfloat16": self.bfloat16}[dtype]

    def decoding(self, dtype: str) -> float:
        """Operations a second of a decoding step, in that precision."""
        return {"float32": self.step_float32, "bfloat16": self.step_bfloat16}[dtype]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama that decide what it costs."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int

    @property
    def body(self) -> int:
        """Weights of the layers' matrices."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        """Weights of the output layer."""
        return self.hidden * self.vocabulary

    def attention(self, start: int, end: int) -> int:
        """Operations of causal attention for the tokens at positions `start` to `end - 1`: each sees those before it
        and itself."""
        seen = (end * (end + 1) - start * (start + 1)) // 2
        return 4 * self.layers * self.heads * self.head_size * seen

    def cached(self, length: int) -> int:
        """Numbers in the cache of a row of `length` tokens."""
        return 2 * self.layers * self.kv_heads * self.head_size * length


def read_shape(config: Path) -> Shape:
    """The shape that a checkpoint's config.json names."""
    values = json.loads(config.read_text())
    heads = values["num_attention_heads"]
    return Shape(
        layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        intermediate=values["intermediate_size"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_size=values.get("head_dim") or values["hidden_size"] // heads,
        vocabulary=values["vocab_size"],
    )


def forward(shape: Shape, prompts: Sequence[int], new_tokens: int, *, head: bool = True) -> int:
    """Operations of one pass over prompts of these lengths with `new_tokens` more each; the output layer, where there
    is one (`head`), at the new tokens alone."""
    lengths = [prompt + new_tokens for prompt in prompts]
    body = sum(2 * shape.body * length + shape.attention(0, length) for length in lengths)
    return body + (2 * shape.head * new_tokens * len(prompts) if head else 0)


def prefill(shape: Shape, prompts: Sequence[int]) -> int:
    """Operations from prompts of these lengths to the distribution of the first new token."""
    body = sum(2 * shape.body * prompt + shape.attention(0, prompt) for prompt in prompts)
    return body + 2 * shape.head * len(prompts)


def decode_seconds(shape: Shape, prompts: Sequence[int], new_tokens: int, dtype: str, peaks: Peaks) -> float:
    """The least time for the new tokens behind the first one, all prompts at once."""
    seconds = 0.0
    for step in range(1, new_tokens):
        operations = sum(
            2 * (shape.body + shape.head) + shape.attention(prompt + step - 1, prompt + step) for prompt in prompts
        )
        read = shape.body + shape.head + sum(shape.cached(prompt + step) for prompt in prompts)
        seconds += max(operations / peaks.decoding(dtype), BYTES[dtype] * read / peaks.copy)
    return seconds


def rollout_seconds(shape: Shape, prompts: Sequence[int], new_tokens: int, dtype: str, peaks: Peaks) -> float:
    """The least time for `new_tokens` sampled behind each of the prompts."""
    return prefill(shape, prompts) / peaks.passing(dtype) + decode_seconds(shape, prompts, new_tokens, dtype, peaks)


def update_seconds(shape: Shape, prompts: Sequence[int], new_tokens: int, dtype: str, peaks: Peaks) -> float:
    """The least time for a pass forwards and backwards, which costs twice the former; nothing is computed again."""
    return 3 * forward(shape, prompts, new_tokens) / peaks.passing(dtype)


def iteration_seconds(
    shape: Shape, prompts: Sequence[int], new_tokens: int, dtype: str, peaks: Peaks, *, epochs: int, models: int
) -> float:
    """The least time for a PPO iteration: the rollout, a pass of every model over it, and the updates.

    `models` is 2 (policy and reference, the critic a head on the policy) or 4 (reward model and critic as well).
    """
    language = forward(shape, prompts, new_tokens)
    scalar = forward(shape, prompts, new_tokens, head=False) if models == 4 else 0
    operations = 2 * language + 2 * scalar + 3 * epochs * (language + scalar)
    return rollout_seconds(shape, prompts, new_tokens, dtype, peaks) + operations / peaks.passing(dtype)


def fitted_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The exponent p of seconds = c sizes^p by least squares on the logarithms; needs two different sizes."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    along = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return along / sum((a - middle_x) ** 2 for a in x)
