"""The engine against transformers' `generate`, teacher forcing, the trainer, its frequencies, and other batches."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.generation.engine import Sample, generate
from rlhf.models.actor_critic import final_hidden
from rlhf.models.batches import pad
from rlhf.models.token_logprobs import token_logprobs
from rlhf.streams import Purpose, token_uniforms
from tests.tiny_models import ARCHITECTURES, EOS, PAD, VOCABULARY, random_tokens, tiny_model

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
@pytest.mark.parametrize("seed", range(3))
def test_greedy_equals_transformers_on_prompts_of_unequal_length(seed: int, architecture: str) -> None:
    model, prompts = tiny_model(architecture, seed), random_tokens(LENGTHS, seed)
    expected = [transformers_greedy(model, prompt) for prompt in prompts]
    for batch_size in (1, 4, 6):
        samples = generate(model, prompts, stop_ids=[EOS], pad_id=PAD, max_new_tokens=NEW, batch_size=batch_size)
        for prompt, sample, reference in zip(prompts, samples, expected, strict=True):
            assert_equal_up_to_ties(model, prompt, sample.tokens, reference)


def transformers_greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    mask = torch.ones_like(tokens)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    return model.generate(tokens, attention_mask=mask, **settings)[0, len(prompt) :].tolist()


def assert_equal_up_to_ties(model: PreTrainedModel, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    """Where they part, both tokens have the largest logit, to 1e-4."""
    if ours == theirs:
        return
    place = next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ours[:place]])).logits[0, -1]
    assert logits[[ours[place], theirs[place]]].min() > logits.max() - 1e-4


def test_other_tokens_than_the_largest_are_no_tie() -> None:
    model, prompt = tiny_model(), random_tokens([5])[0]
    reference = transformers_greedy(model, prompt)
    with pytest.raises(AssertionError):
        assert_equal_up_to_ties(model, prompt, [*reference[:3], reference[3] + 1, *reference[4:]], reference)


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, prompt: list[int], sample: Sample) -> Tensor:
    """Log-softmax (tokens, V) at temperature 0.8 before each token of the sample, without cache or padding."""
    logits = model(torch.tensor([prompt + sample.tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / 0.8, dim=-1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("truncation", [{}, {"top_k": 5, "top_p": 0.9}])
def test_log_probabilities_equal_teacher_forced_ones(truncation: dict[str, float], architecture: str) -> None:
    model, prompts = tiny_model(architecture), random_tokens(LENGTHS)
    for prompt, sample in zip(prompts, sampled(model, prompts, **truncation), strict=True):
        log_probs = teacher_forced(model, prompt, sample)
        expected = log_probs.gather(-1, torch.tensor(sample.tokens)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=2e-5, rtol=0)
        assert sample.kept is None and (sample.kept_mass < 1) == bool(truncation)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exact_log_probabilities_are_those_that_the_trainer_renormalises(architecture: str) -> None:
    """Left-padded with a cache here, right-padded there; and the mass that was kept, by teacher forcing."""
    model, prompts = tiny_model(architecture), random_tokens(LENGTHS)
    samples = sampled(model, prompts, top_k=30, top_p=0.8, exact=True)
    rows = pad(prompts, [sample.tokens for sample in samples], PAD)
    kept = pad_sequence([torch.tensor(ids) for sample in samples for ids in sample.kept], True, padding_value=-1)
    with torch.no_grad():
        hidden = final_hidden(model, rows, torch.float32)[:, :-1][rows.mask]
        expected, _ = token_logprobs(model, hidden, rows.tokens[:, 1:][rows.mask], 0.8, kept=kept)
    got = torch.tensor([value for sample in samples for value in sample.logprobs])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    for prompt, sample in zip(prompts, samples, strict=True):
        probs = teacher_forced(model, prompt, sample).exp()
        masses = [float(row[ids].sum()) for row, ids in zip(probs, sample.kept, strict=True)]
        assert len(masses) == len(sample.tokens) and sample.kept_mass == pytest.approx(np.mean(masses), abs=2e-5)
    assert kept.shape[1] <= 30 and (kept < 0).any()


@pytest.mark.parametrize("truncation", [{}, {"top_k": 6, "top_p": 0.9}])
def test_frequencies_of_whole_responses_follow_the_model(truncation: dict[str, float]) -> None:
    """Two tokens each: chi-square over all pairs of tokens, the rare ones taken together."""
    model, prompt, count = tiny_model("llama", spread=2.0), random_tokens([5])[0], 10_000
    rows = np.zeros(count, dtype=np.int64)
    drawn = token_uniforms(0, Purpose.ROLLOUT, 0, rows, np.arange(count), 2)
    settings = {"max_new_tokens": 2, "uniforms": drawn, "batch_size": 1000} | truncation
    samples = sampled(model, [prompt] * count, stop_ids=[-1], **settings)
    first = kept_distribution(model, [prompt], **truncation)
    second = kept_distribution(model, [[*prompt, token] for token in range(VOCABULARY)], **truncation)
    expected = count * (first[0][:, None] * second).flatten()
    pairs = [sample.tokens[0] * VOCABULARY + sample.tokens[1] for sample in samples]
    counts = np.bincount(pairs, minlength=VOCABULARY**2)
    assert not counts[expected == 0].any() and (expected == 0).any() == bool(truncation)
    cells = np.where(expected >= 5, np.arange(len(expected)) + 1, 0)
    wanted, observed = np.bincount(cells, expected), np.bincount(cells, counts)
    wanted, observed = wanted[wanted > 0], observed[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert wanted.min() >= 5 and statistic < scipy.stats.chi2.ppf(0.999, len(wanted) - 1)


@torch.no_grad()
def kept_distribution(
    model: PreTrainedModel, rows: list[list[int]], top_k: int = VOCABULARY, top_p: float = 1.0
) -> NDArray[np.float64]:
    """The next token's truncated distribution (rows, V) in float64, by sorting."""
    logits = model(torch.tensor(rows)).logits[:, -1].double().numpy() / 0.8
    ranks = (-logits).argsort(axis=1).argsort(axis=1)
    probs = np.exp(logits) * (ranks < top_k)
    probs /= probs.sum(axis=1, keepdims=True)
    more_probable = probs[:, :, None] < probs[:, None, :]
    mass_before = (more_probable * probs[:, None, :]).sum(axis=2)
    probs *= mass_before < top_p
    return probs / probs.sum(axis=1, keepdims=True)


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


def test_a_stop_condition_ends_a_response_like_a_stop_token() -> None:
    model, prompts = tiny_model("qwen2"), random_tokens([4] * 12)
    stops = [7, 11, 30]
    expected = sampled(model, prompts, stop_ids=stops)
    assert sampled(model, prompts, stop_ids=[-1], stop=lambda tokens: tokens[-1] in stops) == expected
    assert {sample.finished for sample in expected} == {False, True}


def test_a_stop_condition_sees_all_tokens_so_far_and_stands_beside_stop_tokens() -> None:
    model, prompts = tiny_model("qwen2"), random_tokens([4] * 12)
    free = sampled(model, prompts, stop_ids=[-1])
    for sample, whole in zip(sampled(model, prompts, stop_ids=[7], stop=lambda t: sum(t) > 200), free, strict=True):
        length = next(n for n in range(1, NEW + 1) if whole.tokens[n - 1] == 7 or sum(whole.tokens[:n]) > 200)
        assert sample.tokens == whole.tokens[:length] and sample.finished


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
