"""Supervised fine-tuning: the loss against transformers' own, response tokens alone, micro-batches, learning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.models.batches import TokenBatch, pad
from rlhf.params import Finetune
from rlhf.streams import Purpose, permutation
from rlhf.training import sft
from rlhf.training.sft import Demonstration, accumulate, finetune
from tests.tiny_models import ARCHITECTURES, EOS, PAD, random_tokens, tiny_model


def settings(**changes: Any) -> Finetune:
    values = {
        "steps": 12,
        "batch_size": 4,
        "micro_batch_size": 4,
        "lr": 0.01,
        "warmup_steps": 2,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }
    return Finetune.model_validate(values | changes)


def demonstrations() -> list[Demonstration]:
    prompts, responses = random_tokens([2, 5, 1, 3, 4, 2]), random_tokens([3, 1, 6, 2, 4, 4], seed=1)
    return [Demonstration(prompt, [*response, EOS]) for prompt, response in zip(prompts, responses, strict=True)]


def batch() -> TokenBatch:
    rows = demonstrations()
    return pad([d.prompt for d in rows], [d.response for d in rows], PAD)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def run(model: PreTrainedModel, finetune_settings: Finetune, seed: int = 0) -> list[dict[str, float]]:
    steps: list[dict[str, float]] = []
    finetune(
        model,
        demonstrations(),
        finetune_settings,
        seed=seed,
        pad_id=PAD,
        dtype=torch.float32,
        on_step=lambda step, numbers: steps.append({"step": step, **numbers}),
    )
    return steps


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradient_are_transformers_own_over_response_tokens_alone(architecture: str) -> None:
    model, rows = tiny_model(architecture), batch()
    places = torch.arange(rows.tokens.shape[1])
    response = (places >= rows.prompt_lengths[:, None]) & (places < rows.lengths[:, None])
    labels = rows.tokens.masked_fill(~response, -100)
    expected = model(rows.tokens, attention_mask=rows.attention_mask, labels=labels).loss
    expected.backward()
    expected_gradients = gradients(model)
    loss = accumulate(model, rows, 100, torch.float32)
    assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_change_neither_loss_nor_gradient(size: int) -> None:
    model, rows = tiny_model(), batch()
    whole, whole_gradients = accumulate(model, rows, len(rows), torch.float32), gradients(model)
    assert accumulate(model, rows, size, torch.float32) == pytest.approx(whole, abs=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, whole_gradients[name], atol=1e-4, rtol=1e-4, msg=name)


def test_the_loss_falls() -> None:
    steps = run(tiny_model(spread=1.0), settings(steps=60))
    assert steps[0]["loss"] == pytest.approx(math.log(48), abs=0.3)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]


def test_steps_are_told_with_their_learning_rate() -> None:
    steps = run(tiny_model(), settings(steps=4, warmup_steps=1))
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert [step["lr"] for step in steps] == pytest.approx([0.005, 0.01, 0.007, 0.004])
    assert all(step["grad_norm"] > 0 for step in steps)


def test_the_seed_alone_decides_the_weights() -> None:
    models = [tiny_model() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        torch.manual_seed(id(model) % 1000)
        run(model, settings(), seed)
    one, again, other = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models)
    assert one.equal(again) and not one.equal(other)


def test_every_pass_sees_every_demonstration_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of three rows are one pass over the six demonstrations."""
    seen: list[list[int]] = []

    def watch(_: PreTrainedModel, rows: TokenBatch, *_more: object) -> float:
        seen.extend(rows.tokens[row, : rows.lengths[row]].tolist() for row in range(len(rows)))
        return 0.0

    monkeypatch.setattr(sft, "accumulate", watch)
    run(tiny_model(), settings(steps=4, batch_size=3))
    whole = [[*d.prompt, *d.response] for d in demonstrations()]
    orders = np.concatenate([permutation(0, Purpose.SHUFFLE_DEMONSTRATIONS, epoch, 6) for epoch in range(2)])
    assert seen == [whole[row] for row in orders]


def test_no_steps_leave_the_model_alone() -> None:
    model = tiny_model()
    assert run(model, settings(steps=0)) == []
    assert all(p.equal(q) for p, q in zip(model.parameters(), tiny_model().parameters(), strict=True))


@pytest.mark.parametrize("poison", ["weight", "gradient"])
def test_what_is_not_finite_stops_before_it_spoils_the_weights(poison: str) -> None:
    model = tiny_model()
    weight = model.get_input_embeddings().weight
    if poison == "weight":
        torch.nn.init.constant_(weight, math.inf)
    else:
        weight.register_hook(lambda gradient: gradient * math.inf)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UserError, match=r"sft\.finetune\.lr: the .* is not finite at step 0"):
        run(model, settings())
    assert all(p.equal(old) for p, old in zip(model.parameters(), before, strict=True))
