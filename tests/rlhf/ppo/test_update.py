"""The update: its gradient against a naive loss, micro-batches, guards, warm-up and separate optimisers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.errors import UserError
from rlhf.models.actor_critic import ActorCritic
from rlhf.models.batches import pad
from rlhf.params import Ppo
from rlhf.ppo.rollout import Experience
from rlhf.ppo.update import Learner, UpdateStats, update
from tests.rlhf.ppo.toy import same, toy_actor_critic, toy_experience, toy_params, weights

ONE_STEP = ("ppo.epochs=1", "ppo.minibatches=1", "ppo.max_grad_norm=1e9", "ppo.critic.warmup_iterations=0")


class Recorder(Learner):
    """Keeps the gradients of every step and takes none."""

    def __init__(self, actor_critic: ActorCritic, settings: Ppo) -> None:
        super().__init__(actor_critic, settings)
        self.gradients: list[dict[str, Tensor]] = []

    def step(self, max_grad_norm: float) -> float:
        named = self.actor_critic.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        self.actor_critic.zero_grad()
        return 0.0


def moved(actor_critic: ActorCritic) -> ActorCritic:
    """Off the weights that made the experience, so that ratios leave 1 and some are clipped."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in actor_critic.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return actor_critic


def setting(*overrides: str) -> tuple[ActorCritic, Experience, Ppo]:
    params = toy_params(*ONE_STEP, *overrides)
    actor_critic = toy_actor_critic(params)
    return actor_critic, toy_experience(actor_critic, params), params.ppo


def run(
    learner: Learner, experience: Experience, settings: Ppo, train_policy: bool = True, **more: object
) -> UpdateStats:
    keys: dict[str, Any] = {"seed": 0, "iteration": 0, "kl_coef": 0.0} | more
    return update(learner, experience, settings, train_policy=train_policy, **keys)


def seen_by(learner: Learner, experience: Experience, settings: Ppo) -> list[UpdateStats]:
    """What the update saw of each minibatch."""
    told: list[UpdateStats] = []
    run(learner, experience, settings, on_minibatch=lambda _, seen: told.append(seen))
    return told


def naive_loss(actor_critic: ActorCritic, experience: Experience, settings: Ppo) -> Tensor:
    """The mean over response tokens of the clipped losses and the entropy bonus, token by token."""
    actions = actor_critic(experience.batch, settings.sampling.temperature)
    losses = []
    for row, t in experience.batch.mask.nonzero().tolist():
        ratio = torch.exp(actions.logprobs[row, t] - experience.logprobs[row, t])
        advantage, target, old = (x[row, t] for x in (experience.advantages, experience.returns, experience.values))
        surrogate = torch.min(
            ratio * advantage, torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high) * advantage
        )
        value = actions.values[row, t]
        near = torch.clamp(value, old - settings.value_clip, old + settings.value_clip)
        error = torch.max((value - target) ** 2, (near - target) ** 2) / 2
        losses.append(-surrogate + settings.value_coef * error - settings.entropy_coef * actions.entropy[row, t])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_the_gradient_is_that_of_the_mean_over_the_minibatchs_tokens(kind: str) -> None:
    actor_critic, experience, settings = setting(f"critic={kind}", "ppo.entropy_coef=0.03", "ppo.value_coef=0.7")
    naive_loss(moved(actor_critic), experience, settings).backward()
    expected = {name: p.grad.clone() for name, p in actor_critic.named_parameters() if p.grad is not None}
    actor_critic.zero_grad()
    learner = Recorder(actor_critic, settings)
    stats = run(learner, experience, settings)
    assert 0 < stats.means()["clip_fraction"] < 1
    close(learner.gradients[0], expected)


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("size", [1, 3, 5, 16])
def test_micro_batches_change_neither_the_gradient_nor_the_statistics(size: int) -> None:
    _, experience, settings = setting("ppo.minibatches=2", "ppo.entropy_coef=0.03")
    results, largest = [], []
    for micro_batch_size in (8, size):
        learner = Recorder(moved(toy_actor_critic(toy_params())), settings)
        changed = settings.model_copy(update={"micro_batch_size": micro_batch_size})
        results.append((learner, run(learner, experience, changed)))
        largest.append(seen_by(Recorder(moved(toy_actor_critic(toy_params())), settings), experience, changed))
    (whole, stats), (parts, part_stats) = results
    assert len(whole.gradients) == len(parts.gradients) == 2
    for one, other in zip(whole.gradients, parts.gradients, strict=True):
        close(one, other)
    assert part_stats.means() == pytest.approx(stats.means(), abs=1e-5, rel=1e-4)
    ratios = [[seen.log_ratio for seen in minibatches] for minibatches in largest]
    assert ratios[1] == pytest.approx(ratios[0], abs=1e-5) and min(ratios[0]) > 0.01


def test_kl_in_the_loss_and_importance_weights_by_the_naive_sum() -> None:
    overrides = ("kl=loss", "ppo.kl.estimator=ratio_k3", "ppo.value_coef=0")
    actor_critic, experience, settings = setting(*overrides)
    generator = torch.Generator().manual_seed(2)
    weights_ = (0.5 + torch.rand(experience.weights.shape, generator=generator)) * experience.batch.mask
    experience = experience._replace(weights=weights_)
    actions = moved(actor_critic)(experience.batch, settings.sampling.temperature)
    terms = []
    for row, t in experience.batch.mask.nonzero().tolist():
        new, old, ref = actions.logprobs[row, t], experience.logprobs[row, t], experience.ref_logprobs[row, t]
        ratio, advantage = torch.exp(new - old), experience.advantages[row, t]
        surrogate = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage)
        k3 = torch.exp(ref - new) - 1 - (ref - new)
        terms.append(weights_[row, t] * (0.7 * ratio * k3 - surrogate))
    torch.stack(terms).mean().backward()
    expected = {name: p.grad.clone() for name, p in actor_critic.policy.named_parameters() if p.grad is not None}
    actor_critic.zero_grad()
    learner = Recorder(actor_critic, settings)
    run(learner, experience, settings, kl_coef=0.7)
    found = {name: gradient for name, gradient in learner.gradients[0].items() if name.startswith("policy.")}
    close({name.removeprefix("policy."): gradient for name, gradient in found.items()}, expected)


def test_demonstrations_add_their_mean_loss_whatever_the_micro_batches() -> None:
    actor_critic, experience, settings = setting("ppo.ptx_coef=0.5", "ppo.micro_batch_size=3")
    prompts = [[3 + row] * (1 + row % 4) for row in range(len(experience.batch))]
    demonstrations = pad(prompts, [[7] * (1 + row % 3) for row in range(len(prompts))], 0)
    plain = Recorder(actor_critic, settings)
    run(plain, experience, settings)
    mixed = Recorder(actor_critic, settings)
    stats = run(mixed, experience, settings, demonstrations=demonstrations)
    logprobs = actor_critic.policy_logprobs(demonstrations, 1.0).logprobs
    loss = -logprobs.sum() / int(demonstrations.mask.sum())
    assert stats.ptx_loss == pytest.approx(float(loss.detach()), rel=1e-5)
    (0.5 * loss).backward()
    for name, parameter in actor_critic.policy.named_parameters():
        added = mixed.gradients[0][f"policy.{name}"] - plain.gradients[0][f"policy.{name}"]
        torch.testing.assert_close(added, parameter.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_target_kl_drops_the_step_that_passes_it_and_all_that_follow() -> None:
    actor_critic, experience, settings = setting("ppo.epochs=4", "critic=separate", "ppo.target_kl=0.002")
    whole = Learner(actor_critic, settings.model_copy(update={"target_kl": None}))
    start = weights(whole)
    assert run(whole, experience, settings.model_copy(update={"target_kl": None})).steps == 4
    other = toy_actor_critic(toy_params("critic=separate"))
    learner = Learner(other, settings)
    assert same(weights(learner), start)
    stats = run(learner, experience, settings)
    assert stats.stopped and 0 < stats.steps < 4
    fewer = settings.model_copy(update={"target_kl": None, "epochs": stats.steps})
    again = Learner(toy_actor_critic(toy_params("critic=separate")), fewer)
    run(again, experience, fewer)
    assert same(weights(learner), weights(again))
    assert all(p.grad is None for p in other.parameters())


def test_every_pass_sees_every_row_once_in_an_order_of_its_own() -> None:
    _, experience, settings = setting("ppo.epochs=2", "ppo.minibatches=4", "ppo.micro_batch_size=4")
    seen: list[Tensor] = []

    class Watching(Recorder):
        def step(self, max_grad_norm: float) -> float:
            seen.append(torch.tensor(self.actor_critic.rows))
            return super().step(max_grad_norm)

    class Counting(ActorCritic):
        rows: list[int]

        def forward(self, batch, temperature, train_policy=True, kept=None):  # type: ignore[no-untyped-def]
            self.rows = [key(batch.tokens[r, : batch.lengths[r]].tolist()) for r in range(len(batch))]
            return super().forward(batch, temperature, train_policy, kept)

    def key(tokens: list[int]) -> int:
        return hash(tuple(tokens))

    plain = toy_actor_critic(toy_params())
    learner = Watching(Counting(plain.policy, None, torch.float32), settings)
    run(learner, experience, settings)
    rows = experience.batch
    everything = sorted(key(rows.tokens[r, : rows.lengths[r]].tolist()) for r in range(len(rows)))
    first, second = torch.cat(seen[:4]).tolist(), torch.cat(seen[4:]).tolist()
    assert sorted(first) == sorted(second) == everything
    assert first != second


def test_the_first_minibatch_has_ratio_one_and_no_clipping() -> None:
    actor_critic, experience, settings = setting("ppo.micro_batch_size=3")
    (stats,) = seen_by(Learner(actor_critic, settings), experience, settings)
    assert stats.log_ratio <= 1e-4
    assert stats.means()["clip_fraction"] == 0
    assert stats.means()["approx_kl"] == pytest.approx(0, abs=1e-8)
    assert stats.tokens == int(experience.batch.mask.sum())


def test_the_largest_log_ratio_is_that_of_the_whole_minibatch() -> None:
    actor_critic, experience, settings = setting("ppo.micro_batch_size=1", "ppo.epochs=2")
    wrong = experience.logprobs.clone()
    row = int(experience.batch.lengths.argmax())
    wrong[row] -= experience.batch.mask[row] * 0.5
    minibatches = seen_by(Recorder(actor_critic, settings), experience._replace(logprobs=wrong), settings)
    assert [seen.log_ratio for seen in minibatches] == pytest.approx([0.5, 0.5], abs=1e-3)


def test_a_gradient_that_is_not_finite_steps_nothing_and_three_in_a_row_stop() -> None:
    actor_critic, experience, settings = setting("critic=separate")
    learner = Learner(actor_critic, settings)
    run(learner, experience, settings)
    before = weights(learner)
    states = optimiser_states(learner)
    bad = experience._replace(advantages=torch.full_like(experience.advantages, math.nan))
    assert math.isnan(run(learner, bad, settings).grad_norm)
    assert same(weights(learner), before) and same(optimiser_states(learner), states)
    assert all(p.grad is None for p in actor_critic.parameters())
    run(learner, bad, settings)
    with pytest.raises(UserError, match="ppo.lr"):
        run(learner, bad, settings)
    assert same(weights(learner), before)


def optimiser_states(learner: Learner) -> dict[str, Tensor]:
    return {
        f"{number}/{place}/{key}": value.clone()
        for number, optimiser in enumerate(learner.optimisers)
        for place, state in optimiser.state_dict()["state"].items()
        for key, value in state.items()
    }


def test_a_critic_that_is_not_finite_holds_the_policy_back_too() -> None:
    actor_critic, experience, settings = setting("critic=separate")
    learner = Learner(actor_critic, settings)
    before = weights(learner)
    stats = run(learner, experience._replace(returns=torch.full_like(experience.returns, math.inf)), settings)
    assert not math.isfinite(stats.grad_norm)
    assert same(weights(learner), before)


def test_a_good_step_forgives_the_bad_ones_before() -> None:
    actor_critic, experience, settings = setting()
    learner = Learner(actor_critic, settings)
    bad = experience._replace(advantages=torch.full_like(experience.advantages, math.nan))
    for one in (bad, bad, experience, bad, bad):
        run(learner, one, settings)
    assert learner.bad_steps == 2


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_critic_warm_up_leaves_the_policy_to_the_byte(kind: str) -> None:
    actor_critic, experience, settings = setting(f"critic={kind}", "ppo.epochs=3", "ppo.weight_decay=0.1")
    learner = Learner(actor_critic, settings)
    before = weights(learner)
    run(learner, experience, settings, train_policy=False)
    after = weights(learner)
    changed = {name.split(".")[0] for name in before if not before[name].equal(after[name])}
    assert changed == ({"value_head", "critic"} if kind == "separate" else {"value_head"})


def test_policy_and_separate_critic_are_clipped_apart() -> None:
    """A huge value error must not shrink the policy's gradient."""
    actor_critic, experience, settings = setting("critic=separate")
    learner = Learner(moved(actor_critic), settings)
    stepped: dict[str, float] = {}

    def record(optimiser: torch.optim.Optimizer, *_: object) -> None:
        stepped[str(optimiser.param_groups[0]["role"])] = norm(optimiser)

    for optimiser in learner.optimisers:
        optimiser.register_step_pre_hook(record)
    far = (1e4 + experience.returns) * experience.batch.mask
    stats = run(learner, experience._replace(returns=far), settings.model_copy(update={"max_grad_norm": 1e-3}))
    assert stats.grad_norm > 100
    assert stepped == pytest.approx({"policy": 1e-3, "critic": 1e-3}, rel=1e-2)


def norm(optimiser: torch.optim.Optimizer) -> float:
    held = [p.grad for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
    return float(torch.cat([gradient.flatten() for gradient in held]).norm())


def test_only_the_policys_learning_rate_is_set() -> None:
    for kind in ("shared", "separate"):
        actor_critic, _, settings = setting(f"critic={kind}", "ppo.critic.lr=0.5")
        learner = Learner(actor_critic, settings)
        learner.set_policy_lr(0.25)
        rates = {group["role"]: group["lr"] for o in learner.optimisers for group in o.param_groups}
        assert rates == {"policy": 0.25, "critic": 0.5}


def test_statistics_by_hand() -> None:
    stats = UpdateStats()
    stats.add(3, policy_loss=torch.tensor([1.0, 2.0, 3.0]), clip_fraction=torch.tensor([True, False, True]))
    stats.add(1, policy_loss=torch.tensor([10.0]), clip_fraction=torch.tensor([False]))
    assert stats.means() == {"policy_loss": 4.0, "clip_fraction": 0.5}
