"""Sampled responses of a policy: the same call for rollouts, preferences and the reward's normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.generation.engine import Sample, generate
from rlhf.generation.stopping import stop_strings
from rlhf.params import Sampler


def sample_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    uniforms: NDArray[np.float64],
    *,
    temperature: float,
    batch_size: int,
    top_k: int = 0,
    top_p: float = 1.0,
    exact: bool = False,
    stop: Sequence[str] = (),
    on_rows: Callable[[int], None] | None = None,
    sampler: Sampler = "transformers",
) -> list[Sample]:
    """One response a prompt, in their order, up to the tokenizer's end-of-sequence or the first of the texts `stop`.

    `uniforms` is (len(prompts), longest response in tokens); the rest is as `generate` has it.
    """
    return generate(
        model,
        prompts,
        stop_ids=[tokenizer.eos_token_id],
        pad_id=tokenizer.eos_token_id,
        max_new_tokens=uniforms.shape[1],
        batch_size=batch_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        exact=exact,
        uniforms=uniforms,
        stop=stop_strings(tokenizer, stop),
        on_rows=on_rows,
        sampler=sampler,
    )
