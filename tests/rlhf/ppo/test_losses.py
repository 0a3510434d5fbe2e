"""The clipped losses on both sides of the clip, for both signs of the advantage: values and gradients by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.ppo.losses import clipped, importance_weights, policy_losses, value_losses

CLIP = 0.2


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # The gradient in the log-probability is -ratio * advantage, and 0 where the clipped term is the smaller one.
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # already raised enough: clipped
        (0.5, 2.0, -1.0, -1.0),  # fallen although it was good: not clipped
        (1.0, -2.0, 2.0, 2.0),
        (0.9, -2.0, 1.8, 1.8),
        (0.5, -2.0, 1.6, 0.0),  # already lowered enough: clipped
        (1.5, -2.0, 3.0, 3.0),  # risen although it was bad: not clipped
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_policy_loss_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    logprobs = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    losses = policy_losses(logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), CLIP, CLIP)
    losses.sum().backward()
    assert float(losses.detach()) == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.25, 2.0, -2.5, -2.5),  # above the lower half-width, within the upper one of 0.3
        (1.5, 2.0, -2.6, 0.0),
        (0.85, -2.0, 1.8, 0.0),  # left the lower half-width of 0.1
        (1.5, -2.0, 3.0, 3.0),
        (2.5, -2.0, 5.0, 5.0),
        (4.0, -2.0, 6.0, 0.0),  # dual clip: no more than 3 times the advantage, and no pull
        (4.0, 2.0, -2.6, 0.0),  # a good action is left to the first clip
    ],
)
def test_asymmetric_and_dual_clip_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    logprobs = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    losses = policy_losses(logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), 0.1, 0.3, dual_clip=3.0)
    losses.sum().backward()
    assert float(losses.detach()) == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(gradient, abs=1e-5)


def test_asymmetric_interval_in_the_clip_fraction() -> None:
    ratios = torch.tensor([0.89, 0.91, 1.29, 1.31])
    assert clipped(ratios.log(), torch.zeros(4), 0.1, 0.3).tolist() == [True, False, False, True]


def test_importance_weights_by_hand() -> None:
    weights = importance_weights(torch.tensor([0.5, 0.2, 0.9]).log(), torch.tensor([0.25, 0.4, 0.1]).log(), cap=3.0)
    assert weights.tolist() == pytest.approx([2.0, 0.5, 3.0])


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (1.1, 1.0, 2.0, 0.5 * 0.9**2, -0.9),  # inside the interval
        (1.5, 1.0, 2.0, 0.5 * 0.8**2, 0.0),  # moved far towards the return: the clipped 1.2 loses more
        (0.5, 1.0, 2.0, 0.5 * 1.5**2, -1.5),  # moved away from it: not clipped
        (0.5, 1.0, 0.0, 0.5 * 0.8**2, 0.0),  # towards a lower return: the clipped 0.8 loses more
        (1.5, 1.0, 0.0, 0.5 * 1.5**2, 1.5),
    ],
)
def test_value_loss_by_hand(value: float, old: float, target: float, loss: float, gradient: float) -> None:
    values = torch.tensor([value], requires_grad=True)
    losses = value_losses(values, torch.tensor([old]), torch.tensor([target]), CLIP)
    losses.sum().backward()
    assert float(losses.detach()) == pytest.approx(loss, abs=1e-6)
    assert values.grad is not None
    assert float(values.grad) == pytest.approx(gradient, abs=1e-6)


def test_clipped_marks_ratios_outside_the_interval() -> None:
    ratios = torch.tensor([0.79, 0.81, 1.0, 1.19, 1.21])
    assert clipped(ratios.log() - 3, torch.full((5,), -3.0), CLIP, CLIP).tolist() == [True, False, False, False, True]


def test_shapes_are_kept() -> None:
    one, two, three = torch.zeros(3, 2, 3)
    assert policy_losses(one, two, three, CLIP, CLIP).shape == value_losses(one, two, three, CLIP).shape == (2, 3)
