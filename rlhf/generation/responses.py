"""Sampled responses of a policy: the same call for rollouts, preferences and the reward's normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.generation.engine import Sample, generate


def sample_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    uniforms: NDArray[np.float64],
    *,
    temperature: float,
    batch_size: int,
    on_rows: Callable[[int], None] | None = None,
) -> list[Sample]:
    """One response a prompt, in their order, up to the tokenizer's end-of-sequence.

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
        uniforms=uniforms,
        on_rows=on_rows,
    )
