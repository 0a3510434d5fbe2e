"""Sampling: `rows` prompts, `new_tokens` each, never ended early, by our engine or by transformers' generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.performance.measured import meter
from bench.performance.measured.setting import DTYPES, model_of, params_of, prompts, within
from rlhf.generation.engine import generate
from rlhf.streams import Purpose, token_uniforms

WARM_UP = 2
Sampling = Callable[[Sequence[Sequence[int]], int], int]
"""Samples so many tokens behind each prompt and returns how many there are in all."""


def main(settings: meter.Settings) -> meter.Numbers:
    """`engine`: native or transformers (ours), generate or generate-static (transformers' own).

    Also `first_seconds`: what the prompts and one new token took, so that the rest is what decoding takes.
    """
    engine, new_tokens = settings["engine"], settings["new_tokens"]
    if engine.startswith("generate"):
        torch.set_num_threads(settings["threads"])
    else:
        params_of(settings)
    model = model_of(settings).to(DTYPES[settings["dtype"]])
    tokens = within(prompts(settings, settings["rows"]), model)
    sampling = theirs(model, engine) if engine.startswith("generate") else ours(model, engine, new_tokens)
    sampling(tokens[:WARM_UP], WARM_UP)
    first = meter.timed(lambda: sampling(tokens, 1))
    watch = meter.Watch()
    sampled = sampling(tokens, new_tokens)
    return {**watch.read(), "first_seconds": first["seconds"], "tokens": sampled}


def ours(model: PreTrainedModel, engine: Any, longest: int) -> Sampling:
    """The engine that rollouts, preferences and evaluation use."""

    def sampling(prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        numbers = range(len(prompts))
        uniforms = token_uniforms(0, Purpose.ROLLOUT, 0, numbers, [0] * len(prompts), longest)
        samples = generate(
            model,
            prompts,
            stop_ids=[],
            pad_id=0,
            max_new_tokens=new_tokens,
            batch_size=len(prompts),
            temperature=1.0,
            uniforms=uniforms[:, :new_tokens],
            sampler=engine,
        )
        return sum(len(sample.tokens) for sample in samples)

    return sampling


def theirs(model: PreTrainedModel, engine: str) -> Sampling:
    """`model.generate` with what it needs for the same work: padding on the left, the whole distribution, no end."""
    cache = {"cache_implementation": "static"} if engine == "generate-static" else {}
    model.generation_config.eos_token_id = None
    torch.manual_seed(0)

    def sampling(prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        arguments = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0, **cache}
        with torch.inference_mode():
            out = model.generate(tokens, attention_mask=mask, max_new_tokens=new_tokens, **arguments)
        return int(out[:, width:].numel())

    return sampling


if __name__ == "__main__":
    meter.run(main)
