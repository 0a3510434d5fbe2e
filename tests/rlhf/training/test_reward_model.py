"""Fitting the reward model: the pair loss by hand, micro-batches, all pairs of a question in one batch, learning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.models.reward_model import from_policy
from rlhf.params import RewardModel
from rlhf.training import reward_model as training
from rlhf.training.reward_model import TokenPair, _accumulate, fit, pair_losses, score_all, score_pairs
from tests.tiny_models import EOS, PAD, random_tokens, tiny_model

GOOD, BAD = 5, 6


def settings(**changes: Any) -> RewardModel:
    values = {
        "epochs": 1,
        "batch_size": 2,
        "micro_batch_size": 4,
        "lr": 0.01,
        "warmup_steps": 1,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "normalisation_samples": 2,
    }
    return RewardModel.model_validate(values | changes)


def questions(count: int = 6, seed: int = 0) -> list[list[TokenPair]]:
    """Questions with one to three pairs each; a good answer holds token 5 where a bad one holds token 6."""
    asked = []
    for number in range(count):
        prompt, *answers = random_tokens([2 + number % 3, *[1 + number % 4] * (1 + number % 3)], seed=seed + number)
        asked.append([TokenPair(prompt, [*answer, GOOD, EOS], [*answer, BAD, EOS]) for answer in answers])
    return asked


def model_with_head(seed: int = 0) -> PreTrainedModel:
    model = from_policy(tiny_model(), PAD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.score.weight)
    return model


def run(
    model: PreTrainedModel, pairs: Sequence[Sequence[TokenPair]], fit_settings: RewardModel, seed: int = 0
) -> list[Any]:
    steps: list[Any] = []
    fit(
        model,
        pairs,
        fit_settings,
        seed=seed,
        pad_id=PAD,
        dtype=torch.float32,
        on_step=lambda step, numbers: steps.append({"step": step, **numbers}),
    )
    return steps


def share_right(model: PreTrainedModel, pairs: Sequence[TokenPair], size: int = 4) -> float:
    scores = score_all(model, pairs, size, PAD, torch.float32)
    return sum(chosen > rejected for chosen, rejected in scores) / len(pairs)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_pair_losses_by_hand() -> None:
    """-log sigmoid(d) = log(1 + exp(-d)): log 2 at 0, log 1.25 at log 4, log 5 at -log 4."""
    log4 = math.log(4)
    losses = pair_losses(torch.tensor([1.0, log4, 0.0]), torch.tensor([1.0, 0.0, log4]))
    assert losses.tolist() == pytest.approx([math.log(2), math.log(1.25), math.log(5)], abs=1e-6)
    assert float(pair_losses(torch.tensor([-500.0]), torch.tensor([500.0]))) == 1000


def test_scores_are_in_the_order_of_the_pairs() -> None:
    model = model_with_head()
    pairs = [pair for question in questions() for pair in question]
    with torch.no_grad():
        chosen, rejected = score_pairs(model, pairs, PAD, torch.float32)
        for number, pair in enumerate(pairs):
            tokens = [torch.tensor([[*pair.prompt, *answer]]) for answer in (pair.chosen, pair.rejected)]
            expected = [float(model(row).logits) for row in tokens]
            assert [float(chosen[number]), float(rejected[number])] == pytest.approx(expected, abs=1e-4)
    for size in (1, 4, 100):
        for number, scores in enumerate(score_all(model, pairs, size, PAD, torch.float32)):
            assert scores == pytest.approx((float(chosen[number]), float(rejected[number])), abs=1e-4)


def test_loss_and_gradient_are_those_of_the_mean_pair() -> None:
    model = model_with_head()
    pairs = [pair for question in questions() for pair in question]
    expected = torch.zeros(())
    for pair in pairs:
        better, worse = (
            model(torch.tensor([[*pair.prompt, *answer]])).logits.squeeze() for answer in (pair.chosen, pair.rejected)
        )
        expected = expected + torch.log1p(torch.exp(worse - better)) / len(pairs)
    expected.backward()
    expected_gradients = gradients(model)
    for size in (1, 3, 100):
        loss, accuracy = _accumulate(model, pairs, size, PAD, torch.float32)
        assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
        assert accuracy == share_right(model, pairs, size)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-4, rtol=1e-3, msg=name)


def test_equal_scores_count_as_wrong() -> None:
    pairs = [pair for question in questions() for pair in question]
    assert _accumulate(from_policy(tiny_model(), PAD), pairs, 4, PAD, torch.float32)[1] == 0


def test_learns_the_order_and_keeps_it_on_new_questions() -> None:
    model = from_policy(tiny_model(spread=2.0), PAD)
    steps = run(model, questions(16), settings(epochs=6, batch_size=4))
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[-1]["loss"] < 0.2
    held_out = [pair for question in questions(8, seed=100) for pair in question]
    assert share_right(model, held_out) == 1


def test_all_pairs_of_a_question_stand_in_one_batch_and_every_epoch_sees_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[list[TokenPair]] = []

    def watch(_: PreTrainedModel, pairs: Sequence[TokenPair], *_more: object) -> tuple[float, float]:
        batches.append(list(pairs))
        return 0.0, 0.0

    monkeypatch.setattr(training, "_accumulate", watch)
    asked = questions(5)
    steps = run(model_with_head(), asked, settings(epochs=2))
    assert len(steps) == len(batches) == 6
    for epoch in (batches[:3], batches[3:]):
        together = [pair for one in epoch for pair in one]
        assert sorted(map(str, together)) == sorted(str(pair) for question in asked for pair in question)
        for question in asked:
            assert sum(all(pair in one for pair in question) for one in epoch) == 1
    assert batches[:3] != batches[3:]


def test_steps_are_told_with_their_learning_rate() -> None:
    steps = run(model_with_head(), questions(6), settings(lr=0.01, warmup_steps=1))
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert [step["lr"] for step in steps] == pytest.approx([0.005, 0.01, 0.0055])


def test_what_is_not_finite_stops_before_it_spoils_the_weights() -> None:
    model = model_with_head()
    model.score.weight.register_hook(lambda gradient: gradient * math.inf)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UserError, match=r"reward_model\.lr: the gradient norm is not finite at step 0"):
        run(model, questions(), settings())
    assert all(p.equal(old) for p, old in zip(model.parameters(), before, strict=True))
