"""KL estimators and the coefficient's controller, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.params import Kl
from rlhf.ppo.kl import KlForm, estimates, kl_losses, next_coef


def settings(kind: str = "adaptive", target: float = 5.0, horizon: float = 1000.0) -> Kl:
    return Kl.model_validate(
        {
            "kind": kind,
            "coef": 0.1,
            "target": target,
            "horizon": horizon,
            "place": "reward",
            "estimator": "k1",
            "limit": None,
        }
    )


def test_estimators_by_hand() -> None:
    """r = policy / reference is 2, 1 and 1/4."""
    logprobs = torch.tensor([2.0, 1.0, 0.25]).log() - 1
    k1, k2, k3 = estimates(logprobs, torch.full((3,), -1.0))
    ln2 = math.log(2)
    assert k1.tolist() == pytest.approx([ln2, 0, -2 * ln2], abs=1e-6)
    assert k2.tolist() == pytest.approx([ln2**2 / 2, 0, 2 * ln2**2], abs=1e-6)
    assert k3.tolist() == pytest.approx([0.5 - 1 + ln2, 0, 4 - 1 - 2 * ln2], abs=1e-6)


def test_k1_and_k3_average_to_the_exact_kl_over_the_policys_distribution() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = float((policy * (policy / reference).log()).sum())
    k1, k2, k3 = estimates(policy.log(), reference.log())
    assert float((policy * k1).sum()) == pytest.approx(exact, abs=1e-6)
    assert float((policy * k3).sum()) == pytest.approx(exact, abs=1e-6)
    assert (k2 >= 0).all() and (k3 >= 0).all() and (k1 < 0).any()


@pytest.mark.parametrize("old", ["on-policy", "off-policy"])
@pytest.mark.parametrize("form", ["ratio_k1", "ratio_k3", "k2", "k3"])
def test_the_gradient_of_each_form_in_the_loss(form: KlForm, old: str) -> None:
    """Against the exact gradient of KL(policy || reference) over a distribution of three: the sum over actions of
    old probability times the loss's gradient is the expectation over samples of the old policy."""
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([-0.5, 0.8, 0.1], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    behind = logprobs.detach() if old == "on-policy" else torch.log_softmax(torch.tensor([0.0, 0.5, 0.2]).double(), 0)
    (reverse,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - logprobs)).sum(), logits, retain_graph=True)
    losses = kl_losses(form, logprobs, behind, ref)
    (gradient,) = torch.autograd.grad((behind.exp() * losses).sum(), logits)
    if form.startswith("ratio") or (form == "k2" and old == "on-policy"):
        torch.testing.assert_close(gradient, reverse)
    elif form == "k3" and old == "on-policy":
        torch.testing.assert_close(gradient, forward)
    else:
        assert not torch.allclose(gradient, reverse, atol=1e-3)


def test_a_small_log_ratio_keeps_its_digits_in_k3() -> None:
    """k3 is x^2 / 2 for a small x; in float32 exp(-x) - 1 + x would be 0 or rounding noise."""
    k3 = estimates(torch.tensor([1e-3]), torch.tensor([0.0])).k3
    assert float(k3) == pytest.approx(0.5e-6 - 1e-9 / 6, rel=1e-3)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (5.0, 0.1),  # on target
        (5.5, 0.1 * (1 + 0.1 * 0.2)),  # 10 % too far, 200 of 1000 sequences
        (4.5, 0.1 * (1 - 0.1 * 0.2)),
        (50.0, 0.1 * (1 + 0.2 * 0.2)),  # the error is clipped at 20 %
        (0.0, 0.1 * (1 - 0.2 * 0.2)),
        (-3.0, 0.1 * (1 - 0.2 * 0.2)),
    ],
)
def test_the_adaptive_coefficient_by_hand(kl: float, expected: float) -> None:
    assert next_coef(0.1, kl, 200, settings()) == pytest.approx(expected, rel=1e-12)


def test_the_horizon_is_the_number_of_sequences_for_the_full_error() -> None:
    assert next_coef(1.0, 10.0, 1000, settings()) == pytest.approx(1.2)
    assert next_coef(1.0, 10.0, 1000, settings(horizon=2000)) == pytest.approx(1.1)


def test_a_fixed_coefficient_stays() -> None:
    assert next_coef(0.1, 50.0, 200, settings(kind="fixed")) == 0.1
