"""Rollouts and experience: what is sampled, what is computed from it, and whitening where no score differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhf.models.actor_critic import ActorCritic, Reference
from rlhf.params import Sampling
from rlhf.ppo.rollout import (
    Experience,
    Rollout,
    build_experience,
    correct_for_sampler,
    evaluate_actions,
    sample,
    whiten_advantages,
)
from rlhf.ppo.trainer import Progress, train
from tests.rlhf.ppo.toy import Toy, tokenizer, toy_actor_critic, toy_experience, toy_params, toy_prompts
from tests.tiny_models import EOS, tiny_model


def rollout(
    actor_critic: ActorCritic,
    numbers: list[int],
    samples: int = 2,
    iteration: int = 0,
    sampling: Sampling | None = None,
    exact: bool = False,
) -> Rollout:
    sampling = sampling or toy_params().ppo.sampling
    settings = {"exact": exact, "seed": 0, "iteration": iteration}
    return sample(actor_critic.policy, tokenizer(), toy_prompts(), np.array(numbers), samples, sampling, **settings)


def responses(drawn: Rollout) -> list[list[int]]:
    batch = drawn.batch
    return [batch.tokens[row, 1:][batch.mask[row]].tolist() for row in range(len(batch))]


def test_rows_are_the_prompts_in_order_each_with_its_responses() -> None:
    drawn = rollout(toy_actor_critic(toy_params()), [7, 2, 11])
    prompts = toy_prompts()
    assert [problem.question for problem in drawn.problems] == [f"question {n}" for n in (7, 7, 2, 2, 11, 11)]
    for row, number in enumerate((7, 7, 2, 2, 11, 11)):
        length = int(drawn.batch.prompt_lengths[row])
        assert drawn.batch.tokens[row, :length].tolist() == prompts[number].tokens
    assert len({tuple(tokens) for tokens in responses(drawn)}) == 6


def test_finished_rows_are_those_that_end_in_end_of_sequence() -> None:
    drawn = rollout(toy_actor_critic(toy_params()), list(range(20)))
    ends = [tokens[-1] == EOS for tokens in responses(drawn)]
    assert drawn.finished.tolist() == ends and 0 < sum(ends) < len(ends)
    for tokens, text, end in zip(responses(drawn), drawn.texts, ends, strict=True):
        assert len(tokens) == 8 or end
        assert EOS not in tokens[:-1]
        assert text.split() == [f"w{token}" for token in tokens if token not in (EOS, 0)]


def test_a_response_depends_on_iteration_prompt_and_sample_alone() -> None:
    model = toy_actor_critic(toy_params())
    first = responses(rollout(model, [7, 2, 11]))
    assert responses(rollout(model, [11, 7]))[2:] == first[:2]
    assert responses(rollout(model, [7], samples=1)) == first[:1]
    assert responses(rollout(model, [7, 2, 11], iteration=1)) != first


def test_a_prompt_that_comes_twice_in_an_iteration_gets_different_responses() -> None:
    """Where an iteration reaches over the end of an epoch, or holds more prompts than the split."""
    drawn = responses(rollout(toy_actor_critic(toy_params()), [7, 2, 7]))
    assert len({tuple(tokens) for tokens in drawn}) == 6
    assert drawn[:4] == responses(rollout(toy_actor_critic(toy_params()), [7, 2]))


def test_the_samplers_log_probabilities_are_the_trainers() -> None:
    model = toy_actor_critic(toy_params())
    drawn = rollout(model, [7, 2, 11])
    with torch.no_grad():
        actions = model(drawn.batch, toy_params().ppo.sampling.temperature)
    torch.testing.assert_close(drawn.sampler_logprobs, actions.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_evaluating_actions_does_not_depend_on_micro_batches(size: int) -> None:
    model = toy_actor_critic(toy_params())
    torch.nn.init.ones_(model.value_head.linear.weight)
    reference = Reference(tiny_model(seed=5), torch.float32)
    batch = rollout(model, [7, 2, 11]).batch
    whole = evaluate_actions(model, reference, batch, 0.9, len(batch))
    parts = evaluate_actions(model, reference, batch, 0.9, size)
    for one, other in zip(whole, parts, strict=True):
        assert one.shape == batch.mask.shape and not one.requires_grad
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole.ref_logprobs, reference.logprobs(batch, 0.9), atol=1e-5, rtol=0)


def test_log_probabilities_that_are_known_are_not_computed_again() -> None:
    model, reference = toy_actor_critic(toy_params()), Reference(tiny_model(seed=5), torch.float32)
    torch.nn.init.ones_(model.value_head.linear.weight)
    batch = rollout(model, [7, 2, 11]).batch
    known = torch.rand(batch.mask.shape) * batch.mask
    plain = evaluate_actions(model, reference, batch, 0.9, 4)
    given = evaluate_actions(model, reference, batch, 0.9, 4, sampled=known)
    assert given.logprobs.equal(known)
    assert given.values.equal(plain.values) and given.ref_logprobs.equal(plain.ref_logprobs)


def test_experience_puts_kl_and_score_into_returns() -> None:
    """gamma and lambda 1: the return is the score less beta times the KL that is still to come."""
    model = toy_actor_critic(toy_params())
    drawn = rollout(model, [7, 2])
    batch = drawn.batch
    evaluated = evaluate_actions(model, Reference(tiny_model(seed=5), torch.float32), batch, 1.0, 8)
    scores = torch.tensor([1.0, 0.0, -2.0, 0.5])
    got = build_experience(drawn, evaluated, scores, toy_params("ppo.lam=1").ppo, kl_coef=0.1)
    k1 = evaluated.logprobs - evaluated.ref_logprobs
    to_come = k1.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(got.returns, (scores[:, None] - 0.1 * to_come) * batch.mask, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.advantages, got.returns - evaluated.values)
    assert got.ref_logprobs.equal(evaluated.ref_logprobs) and got.weights.equal(batch.mask.float())


def test_a_sampler_that_rounds_otherwise_is_weighed() -> None:
    """pi_trainer / pi_sampler is 2 on the first row, capped at 1.5, and 1/2 on the others."""
    model = toy_actor_critic(toy_params())
    drawn = rollout(model, [7, 2])
    mask = drawn.batch.mask
    before = toy_experience(model, toy_params())._replace(batch=drawn.batch, logprobs=drawn.sampler_logprobs)
    shift = torch.full((4, 1), 0.5).index_fill(0, torch.tensor([0]), 2.0).log()
    after = correct_for_sampler(before, drawn._replace(sampler_logprobs=(before.logprobs - shift) * mask), cap=1.5)
    expected = torch.tensor([[1.5], [0.5], [0.5], [0.5]]) * mask
    torch.testing.assert_close(after.weights, expected)


def experience() -> Experience:
    params = toy_params()
    return toy_experience(toy_actor_critic(params), params)


def test_selected_rows_keep_their_tensors() -> None:
    whole = experience()
    whole = whole._replace(kept=torch.arange(whole.logprobs.numel() * 3).view(*whole.logprobs.shape, 3))
    rows = torch.tensor([5, 1, 9])
    part = whole.select(rows)
    width = part.batch.tokens.shape[1] - 1
    for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns", "weights", "kept"):
        assert getattr(part, name).equal(getattr(whole, name)[rows, :width])
    assert not whole.logprobs[rows, width:].any()


def test_whitened_advantages_have_mean_zero_and_deviation_one_and_returns_stay() -> None:
    before = experience()
    after, std = whiten_advantages(before, torch.tensor([0.0, 1.0]), None)
    values = after.advantages[after.batch.mask].double()
    assert float(values.mean()) == pytest.approx(0, abs=1e-6)
    assert float(values.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert after.returns.equal(before.returns)
    assert std == pytest.approx(float(before.advantages[before.batch.mask].double().std(correction=0)))


@pytest.mark.parametrize(("last", "divisor"), [(None, 1.0), (4.0, 4.0)])
def test_equal_scores_take_the_last_deviation(last: float | None, divisor: float) -> None:
    before = experience()
    after, std = whiten_advantages(before, torch.ones(16), last)
    mask = before.batch.mask
    expected = (before.advantages - before.advantages[mask].mean()) / divisor * mask
    torch.testing.assert_close(after.advantages, expected, atol=1e-5, rtol=1e-5)
    assert std == last


CUT = toy_params("ppo.sampling.top_k=7", "ppo.sampling.top_p=0.9").ppo.sampling


def test_without_truncation_nothing_is_cut_and_nothing_kept() -> None:
    more_than_there_are = toy_params("ppo.sampling.top_k=1000").ppo.sampling
    for exact, sampling in ((False, None), (True, None), (True, more_than_there_are)):
        drawn = rollout(toy_actor_critic(toy_params()), [7, 2, 11], exact=exact, sampling=sampling)
        assert drawn.cut_mass == pytest.approx(0, abs=1e-12) and drawn.kept is None


def test_full_truncation_keeps_the_full_distributions_log_probabilities_and_says_what_was_cut() -> None:
    model = toy_actor_critic(toy_params())
    drawn = rollout(model, [7, 2, 11], sampling=CUT)
    assert 0.05 < drawn.cut_mass < 1 and drawn.kept is None
    with torch.no_grad():
        torch.testing.assert_close(drawn.sampler_logprobs, model(drawn.batch, 1.0).logprobs, atol=1e-5, rtol=0)


def test_exact_truncation_renormalises_policy_and_reference_over_the_kept_tokens() -> None:
    model, reference = toy_actor_critic(toy_params()), Reference(tiny_model(seed=5), torch.float32)
    drawn = rollout(model, [7, 2, 11], sampling=CUT, exact=True)
    assert drawn.kept is not None and drawn.kept.shape[2] <= 7
    for size in (2, 100):
        evaluated = evaluate_actions(model, reference, drawn.batch, 1.0, size, drawn.kept)
        torch.testing.assert_close(drawn.sampler_logprobs, evaluated.logprobs, atol=1e-5, rtol=0)
        for row, t in drawn.batch.mask.nonzero().tolist():
            ids = drawn.kept[row, t][drawn.kept[row, t] >= 0].long()
            tokens = drawn.batch.tokens[row : row + 1, : t + 1]
            logits = tiny_model(seed=5)(tokens).logits[0, -1, ids].detach()
            place = ids.tolist().index(int(drawn.batch.tokens[row, t + 1]))
            assert float(evaluated.ref_logprobs[row, t]) == pytest.approx(
                float(torch.log_softmax(logits, 0)[place]), abs=1e-4
            )


@pytest.mark.parametrize("truncation", ["full", "exact"])
def test_ppo_learns_with_truncated_sampling_and_its_first_ratio_is_one(truncation: str) -> None:
    cut = ("ppo.sampling.top_k=20", "ppo.sampling.top_p=0.95", f"ppo.truncation={truncation}")
    rows = train(Toy(toy_params(*cut, "ppo.iterations=8", "ppo.epochs=2")).loop(), Progress()).rows[1:]
    assert rows[-1]["score"] > rows[0]["score"] + 0.2
    assert all(row["first_log_ratio"] < 1e-4 and row["mismatch"] < 1e-5 for row in rows)


def test_a_stop_string_finishes_a_response() -> None:
    model, plain = toy_actor_critic(toy_params()), toy_params().ppo.sampling
    free = rollout(model, [7, 2, 11, 5])
    text = max((t for t in free.texts if len(t) > 3), key=len)
    stopped = rollout(model, [7, 2, 11, 5], sampling=plain.model_copy(update={"stop": [text[1:3]]}))
    row = free.texts.index(text)
    assert stopped.texts[row] == text[: len(stopped.texts[row])] and text[1:3] in stopped.texts[row]
    assert bool(stopped.finished[row]) and len(stopped.texts[row]) < len(text)
