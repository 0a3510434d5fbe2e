"""The machine's peaks: matrix products through the best library call at the model's shapes, and the copy rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from bench.performance.measured import meter
from rlhf.generation.llama.weights import PackedLinear

SECONDS, COPIED = 0.15, 1 << 28
"""How long each product is repeated, and the bytes of the copied tensor."""


def main(settings: meter.Settings) -> meter.Numbers:
    """`rows` of a decoding step's products, `many` of a long pass's; `matrices`: [inputs, outputs] of each."""
    torch.set_num_threads(settings["threads"])
    numbers: meter.Numbers = {}
    with torch.inference_mode():
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            for prefix, tokens in (("", settings["many"]), ("step_", settings["rows"])):
                numbers[f"{prefix}{name}"] = max(rates(tokens, settings["matrices"], dtype))
        source = torch.ones(COPIED, dtype=torch.uint8)
        target = torch.empty_like(source)
        numbers["copy"] = 2 * COPIED / best_seconds(lambda: target.copy_(source))  # read and written
    return numbers


def rates(tokens: int, matrices: Sequence[tuple[int, int]], dtype: torch.dtype) -> Iterator[float]:
    """Operations a second of each product, each way."""
    for inputs, outputs in matrices:
        for product in products(tokens, inputs, outputs, dtype):
            yield 2 * tokens * inputs * outputs / best_seconds(product)


def products(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> Iterator[Callable[[], Tensor]]:
    """The calls that multiply (tokens, inputs) with a weight: torch's own, and with the weight laid out by oneDNN."""
    x, layer = torch.randn(tokens, inputs).to(dtype), nn.Linear(inputs, outputs, bias=False, dtype=dtype)
    yield partial(layer, x)
    yield partial(PackedLinear(layer, dtype=dtype), x)


def best_seconds(work: Callable[[], Tensor]) -> float:
    """The fastest of the calls that fit into `SECONDS`, after one that nobody measures."""
    work()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    meter.run(main)
