"""`sample_responses` against `generate` with the tokenizer's end-of-sequence spelled out."""

from __future__ import annotations

import numpy as np

from rlhf.generation.engine import generate
from rlhf.generation.responses import sample_responses
from rlhf.streams import Purpose, token_uniforms
from tests.tiny_models import EOS, PAD, random_tokens, tiny_model, tiny_tokenizer

NEW = 12


def test_it_is_the_engine_with_the_tokenizers_end_of_sequence() -> None:
    model, prompts = tiny_model(), random_tokens([3, 9, 5, 12, 4, 6, 7, 8] * 2)
    rows = np.arange(len(prompts))
    drawn = token_uniforms(0, Purpose.ROLLOUT, 0, rows, 0 * rows, NEW)
    reported: list[int] = []
    samples = sample_responses(
        model, tiny_tokenizer(), prompts, drawn, temperature=0.7, batch_size=5, on_rows=reported.append
    )
    limits = {"max_new_tokens": NEW, "batch_size": 5}
    assert samples == generate(model, prompts, stop_ids=[EOS], pad_id=PAD, temperature=0.7, uniforms=drawn, **limits)
    assert sum(reported) == len(prompts)
    assert {sample.tokens[-1] == EOS for sample in samples if sample.finished} == {True}
    assert 0 < sum(sample.finished for sample in samples) < len(samples)
    assert {len(sample.tokens) for sample in samples if not sample.finished} == {NEW}
