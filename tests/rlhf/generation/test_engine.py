"""The engine against transformers' `generate`, against teacher forcing, and against itself in other batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.generation.engine import Sample, generate
from rlhf.streams import Purpose, token_uniforms
from tests.tiny_models import ARCHITECTURES, EOS, PAD, random_tokens, tiny_model

LENGTHS = [3, 9, 5, 12, 1, 9]
NEW = 16


def sampled(
    model: PreTrainedModel,
    prompts: list[list[int]],
    batch_size: int = 4,
    stop_ids: list[int] | None = None,
    **more: object,
) -> list[Sample]:
    rows = np.arange(len(prompts))
    drawn = token_uniforms(0, Purpose.ROLLOUT, 0, rows, 0 * rows, NEW)
    settings = {"max_new_tokens": NEW, "temperature": 0.8, "uniforms": drawn, "pad_id": PAD} | more
    return generate(model, prompts, stop_ids=stop_ids or [EOS], batch_size=batch_size, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_transformers_on_prompts_of_unequal_length(architecture: str) -> None:
    model, prompts = tiny_model(architecture), random_tokens(LENGTHS)
    for batch_size in (1, 4, 6):
        samples = generate(model, prompts, stop_ids=[EOS], pad_id=PAD, max_new_tokens=NEW, batch_size=batch_size)
        assert [sample.tokens for sample in samples] == [transformers_greedy(model, prompt) for prompt in prompts]


def transformers_greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    mask = torch.ones_like(tokens)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    return model.generate(tokens, attention_mask=mask, **settings)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_equal_teacher_forced_ones(architecture: str) -> None:
    model, prompts = tiny_model(architecture), random_tokens(LENGTHS)
    for prompt, sample in zip(prompts, sampled(model, prompts), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sample.tokens])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / 0.8, dim=-1).gather(-1, torch.tensor(sample.tokens)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_another_batch_size_gives_the_same_samples(architecture: str) -> None:
    model, prompts = tiny_model(architecture), random_tokens(LENGTHS)
    alone = sampled(model, prompts, batch_size=1)
    for batch_size in (2, 4, 6, 100):
        together = sampled(model, prompts, batch_size=batch_size)
        assert [sample.tokens for sample in together] == [sample.tokens for sample in alone]
        for one, other in zip(alone, together, strict=True):
            assert other.logprobs == pytest.approx(one.logprobs, abs=2e-5)


def test_each_row_follows_its_own_uniforms() -> None:
    model, prompts = tiny_model("qwen2"), random_tokens(LENGTHS)
    rows = np.arange(len(prompts))
    drawn = token_uniforms(0, Purpose.ROLLOUT, 0, rows, 0 * rows, NEW)
    backwards = sampled(model, prompts[::-1], uniforms=drawn[::-1])
    assert [sample.tokens for sample in backwards[::-1]] == [sample.tokens for sample in sampled(model, prompts)]
    same_prompt = sampled(model, [prompts[0]] * len(prompts))
    assert len({tuple(sample.tokens) for sample in same_prompt}) == len(prompts)


def test_responses_end_at_the_stop_token_and_keep_it() -> None:
    model, prompts = tiny_model("qwen2"), random_tokens([4] * 12)
    free = sampled(model, prompts, stop_ids=[-1])
    assert all(len(sample.tokens) == NEW and not sample.finished for sample in free)
    stops = [7, 11, 30]
    for sample, whole in zip(sampled(model, prompts, stop_ids=stops), free, strict=True):
        ends = [place for place, token in enumerate(whole.tokens) if token in stops]
        length = ends[0] + 1 if ends else NEW
        assert sample.tokens == whole.tokens[:length]
        assert sample.logprobs == pytest.approx(whole.logprobs[:length], abs=2e-5)
        assert sample.finished == bool(ends)
    assert 0 < sum(any(token in stops for token in whole.tokens) for whole in free) < len(free)


def test_a_stop_token_in_the_last_place_counts_as_finished() -> None:
    model, prompts = tiny_model("qwen2"), random_tokens([4])
    whole = sampled(model, prompts, stop_ids=[-1])[0].tokens
    place = next(i for i in range(2, NEW) if whole[i] not in whole[:i])
    cut = {"max_new_tokens": place + 1}
    assert sampled(model, prompts, stop_ids=[whole[place]], **cut)[0].finished
    assert not sampled(model, prompts, stop_ids=[-1], **cut)[0].finished
    assert len(sampled(model, prompts, stop_ids=[-1], **cut)[0].tokens) == place + 1


def test_all_rows_are_reported_and_no_prompts_give_no_samples() -> None:
    model = tiny_model()
    reported: list[int] = []
    sampled(model, random_tokens(LENGTHS), on_rows=reported.append)
    assert sum(reported) == len(LENGTHS)
    assert generate(model, [], stop_ids=[EOS], pad_id=PAD, max_new_tokens=4, batch_size=2) == []


def test_the_pad_token_is_never_attended_to() -> None:
    model, prompts = tiny_model("gpt2"), random_tokens(LENGTHS)
    assert sampled(model, prompts, pad_id=PAD) == sampled(model, prompts, pad_id=37)


def test_a_response_that_may_leave_the_context_is_refused() -> None:
    model = tiny_model()
    context = model.config.max_position_embeddings
    with pytest.raises(UserError, match=f"context of {context}: lower max_new_tokens"):
        generate(model, [[5] * 10], stop_ids=[7], pad_id=0, max_new_tokens=context - 9, batch_size=1)
