"""Schedule, clipping and the refusal of numbers that are not finite, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlhf.errors import UserError
from rlhf.training.optimisation import adamw, clip_gradients, finite, take_step, warmup_and_decay


def test_the_learning_rate_rises_and_falls_linearly_to_a_tenth() -> None:
    shares = [warmup_and_decay(step, 13, 3) for step in range(14)]
    rise, fall = [0.25, 0.5, 0.75], [1 - 0.09 * step for step in range(11)]
    assert shares == pytest.approx(rise + fall)
    assert shares[-1] == pytest.approx(0.1)


def test_schedules_without_warm_up_or_with_nothing_but_warm_up() -> None:
    assert warmup_and_decay(0, 10, 0) == 1
    assert [warmup_and_decay(step, 2, 5) for step in range(2)] == pytest.approx([1 / 6, 2 / 6])
    assert warmup_and_decay(1, 1, 1) == 1


def test_gradients_are_scaled_down_to_the_norm_and_never_up() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients([parameter], 1.0) == 5
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]), atol=1e-5, rtol=0)
    assert clip_gradients([parameter], 10.0) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]), atol=1e-5, rtol=0)


def test_adamw_by_hand() -> None:
    """The first step moves by the rate against the gradient's sign, after the weight has shrunk by rate x decay."""
    parameter = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimiser = adamw([parameter], lr=0.1, weight_decay=0.5)
    parameter.grad = torch.tensor([2.0, -0.001])
    optimiser.step()
    assert parameter.tolist() == pytest.approx([1 - 0.05 - 0.1, 1 - 0.05 + 0.1], abs=1e-5)


def test_only_finite_numbers_pass() -> None:
    assert finite(torch.tensor(1.5), "loss", 3, "sft.finetune.lr") == 1.5
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(UserError, match=r"^sft.finetune.lr: the loss is not finite at step 3: lower"):
            finite(value, "loss", 3, "sft.finetune.lr")


def test_a_step_clips_moves_at_the_rate_and_forgets_the_gradient() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimiser = adamw([parameter], lr=1.0, weight_decay=0.0)
    parameter.grad = torch.tensor([3.0, -4.0])
    numbers = take_step(optimiser, 2.0, 0, lr=0.1, max_grad_norm=1.0, key="sft.finetune.lr")
    assert numbers == {"loss": 2.0, "grad_norm": 5.0, "lr": 0.1}
    assert parameter.tolist() == pytest.approx([0.9, 1.1], abs=1e-5)
    assert parameter.grad is None
    assert optimiser.state[parameter]["exp_avg"].tolist() == pytest.approx([0.06, -0.08], abs=1e-5)


def test_a_step_that_is_not_finite_is_not_taken() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimiser = adamw([parameter], lr=1.0, weight_decay=0.0)
    for loss, gradient, name in ((math.nan, 1.0, "loss"), (1.0, math.inf, "gradient norm")):
        parameter.grad = torch.tensor([gradient])
        with pytest.raises(UserError, match=rf"^reward_model.lr: the {name} is not finite at step 4"):
            take_step(optimiser, loss, 4, lr=0.1, max_grad_norm=1.0, key="reward_model.lr")
    assert parameter.item() == 1
