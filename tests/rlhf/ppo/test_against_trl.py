"""Our functions on a batch that TRL 1.12's PPOTrainer trained on, against the numbers it got.

`tests/fixtures/trl/make.py` recorded them. Where TRL computes something else, a test shows that the two differ, and
that they agree once exactly that difference is taken back. `docs/ppo.md` has the list.

Two frames: ours has an action for every response token. TRL's has one more where a response ends before the batch's
longest does: the state behind the last token, whose value is learned, and where the score is paid.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf.models.actor_critic import ActorCritic
from rlhf.ppo.advantages import gae, moments, whiten
from rlhf.ppo.kl import estimates
from rlhf.ppo.losses import clipped, policy_losses, value_losses
from rlhf.ppo.rewards import task_scores, token_rewards
from tests.rlhf.ppo.toy import toy_params
from tests.rlhf.ppo.trl_batch import Frame, Tensors, actor_critic, frame, group, micro_batch, recorded

EXACT = 1e-6
FLOAT32 = 4e-6  # our models compute in float32, the recorded ones in float64
MICRO_BATCHES = (0, 1, 2, 3)
UPDATED = (2, 3)  # of the second epoch, behind the first step: their ratios are not 1


@pytest.fixture
def plain() -> Tensors:
    return group("plain/")


@pytest.fixture
def settings() -> dict[str, float]:
    return recorded()[1]["settings"]


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference, relative to theirs."""
    assert ours.shape == theirs.shape
    return float(torch.linalg.vector_norm(ours.double() - theirs.double()) / torch.linalg.vector_norm(theirs.double()))


def agree(ours: Tensor, theirs: Tensor, tolerance: float = EXACT) -> bool:
    return distance(ours, theirs) < tolerance


def differ(ours: Tensor, theirs: Tensor) -> bool:
    return distance(ours, theirs) > 1e-3


def unbiased(std: float, count: int) -> float:
    """TRL divides by n - 1 (Bessel's correction), we by n."""
    return std * (count / (count - 1)) ** 0.5


def losses(new: Tensors, old: Tensors, settings: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Our policy and value losses of each action, in the shape of the tensors."""
    clip = settings["cliprange"]
    policy = policy_losses(new["logprobs"], old["logprobs"], old["advantages"], clip, clip)
    value = value_losses(new["values"], old["values"], old["returns"], settings["cliprange_value"])
    return policy, value


# Models


def test_logprobs_and_values_do_not_depend_on_the_side_of_the_padding(
    plain: Tensors, settings: dict[str, float]
) -> None:
    """TRL pads prompts on the left, has old log-probabilities from its sampler, and adds 1e-7 to the temperature."""
    ours, temperature = actor_critic(0), settings["temperature"] + 1e-7
    responses = frame(plain, behind_the_end=False)
    with torch.no_grad():
        actions = ours(responses.batch, temperature)
    assert agree(actions.logprobs[responses.batch.mask], plain["logprobs"][responses.places], FLOAT32)
    assert agree(actions.values[responses.batch.mask], plain["values"][responses.places], FLOAT32)


def test_entropy(settings: dict[str, float]) -> None:
    """Equal on every response action; TRL logs the mean over the padding as well."""
    ours, temperature = actor_critic(1), settings["temperature"] + 1e-7
    new, _, mask, _ = micro_batch(2)
    responses = frame(group("plain/"), behind_the_end=False, rows=new["rows"])
    with torch.no_grad():
        entropy = ours(responses.batch, temperature).entropy[responses.batch.mask]
    assert agree(entropy, new["entropy"][mask], FLOAT32)
    logged = group("plain/")["entropy"][2]
    assert differ(entropy.mean(), logged)
    assert agree(new["entropy"].mean(), logged)


# Rewards


def test_kl_and_score_in_the_reward(plain: Tensors, settings: dict[str, float]) -> None:
    """The KL is the same on every action; TRL pays the score one place later where the response ended early."""
    own, theirs = (frame(plain, behind_the_end=extended) for extended in (False, True))

    def rewards(frame: Frame) -> Tensor:
        kl = estimates(frame.ours(plain["logprobs"]), frame.ours(plain["ref_logprobs"]))
        return token_rewards(plain["scores"], kl.k1, frame.batch, settings["kl_coef"])

    early = plain["padding_mask"][:, -1]
    in_their_layout = torch.zeros_like(plain["rewards"]).masked_scatter(own.places, rewards(own)[own.batch.mask])
    assert agree(in_their_layout[~early], plain["rewards"][~early])
    assert differ(in_their_layout[early], plain["rewards"][early])
    assert agree(rewards(theirs)[theirs.batch.mask], plain["rewards"][theirs.places])


def test_k3_and_whitening_of_rewards(settings: dict[str, float]) -> None:
    """TRL can put k3 in the reward, which we refuse, and whitens token rewards; we whiten the scores of responses.

    As for advantages its variance is unbiased; the mean is kept.
    """
    run = group("variants/")
    theirs = frame(run, behind_the_end=True)
    kl = estimates(theirs.ours(run["logprobs"]), theirs.ours(run["ref_logprobs"]))
    rewards = token_rewards(run["scores"], kl.k3, theirs.batch, settings["kl_coef"])
    assert differ(rewards[theirs.batch.mask], run["rewards"][theirs.places])
    mean, std = moments(rewards, theirs.batch.mask)
    whitened = whiten(rewards, theirs.batch.mask, mean, unbiased(std, int(theirs.places.sum()))) + mean
    assert agree(whitened[theirs.batch.mask], run["rewards"][theirs.places])


def test_a_missing_end_is_taken_off_the_score_there_and_replaces_it_here(
    plain: Tensors, settings: dict[str, float]
) -> None:
    penalised, penalty = group("variants/")["scores"], settings["missing_eos_penalty"]
    finished = (plain["responses"] == 1).any(dim=1)
    assert plain["responses"].equal(group("variants/")["responses"]) and 0 < int(finished.sum()) < len(finished)
    assert agree(penalised, plain["scores"] - penalty * ~finished)
    ours = task_scores(plain["scores"], finished, toy_params("ppo.reward.cut_off_score=-1.5").ppo.reward)
    assert agree(ours[finished], penalised[finished])
    assert ours[~finished].eq(-1.5).all()


# Advantages


def test_advantages_and_returns(plain: Tensors, settings: dict[str, float]) -> None:
    """Equal where a response fills its row; where it ends early, equal with TRL's further state as a last action."""
    gamma, lam = settings["gamma"], settings["lam"]
    own, theirs = (frame(plain, behind_the_end=extended) for extended in (False, True))
    unwhitened = plain["returns"] - plain["values"]
    advantages, returns = gae(
        theirs.ours(plain["rewards"]), theirs.ours(plain["values"]), theirs.batch.mask, gamma, lam
    )
    assert agree(advantages[theirs.batch.mask], unwhitened[theirs.places])
    assert agree(returns[theirs.batch.mask], plain["returns"][theirs.places])

    early = plain["padding_mask"][:, -1]
    terminal = own_advantages(plain, settings, gamma, lam)
    assert agree(terminal[~early], (unwhitened * own.places)[~early])
    assert differ(terminal[early], (unwhitened * own.places)[early])


def test_with_gamma_and_lambda_one_the_further_state_changes_nothing(
    plain: Tensors, settings: dict[str, float]
) -> None:
    """Its value then comes in and goes out again."""
    theirs = frame(plain, behind_the_end=True)
    rewards, values = theirs.ours(plain["rewards"]), theirs.ours(plain["values"])
    advantages, _ = gae(rewards, values, theirs.batch.mask, 1.0, 1.0)
    in_their_layout = torch.zeros_like(plain["rewards"]).masked_scatter(theirs.places, advantages[theirs.batch.mask])
    assert agree(own_advantages(plain, settings, 1.0, 1.0), in_their_layout * ~plain["padding_mask"])


def own_advantages(run: Tensors, settings: dict[str, float], gamma: float, lam: float) -> Tensor:
    """Our advantages, the last response action terminal, in TRL's layout (B, response length)."""
    own = frame(run, behind_the_end=False)
    kl = estimates(own.ours(run["logprobs"]), own.ours(run["ref_logprobs"]))
    rewards = token_rewards(run["scores"], kl.k1, own.batch, settings["kl_coef"])
    advantages, _ = gae(rewards, own.ours(run["values"]), own.batch.mask, gamma, lam)
    return torch.zeros_like(run["rewards"]).masked_scatter(own.places, advantages[own.batch.mask])


@pytest.mark.parametrize("name", ["plain/", "variants/"])
def test_whitening_of_advantages(name: str) -> None:
    """TRL's variance is unbiased, ours is the population's; both leave the state behind the end out."""
    run = group(name)
    mask = ~run["padding_mask"]
    advantages = run["returns"] - run["values"]
    mean, std = moments(advantages, mask)
    assert differ(whiten(advantages, mask, mean, std), run["advantages"])
    assert agree(whiten(advantages, mask, mean, unbiased(std, int(mask.sum()))), run["advantages"])


# Losses


@pytest.mark.parametrize("number", MICRO_BATCHES)
def test_losses(number: int, settings: dict[str, float]) -> None:
    """The same for each action, both with the clip and the half; TRL's value loss takes the state behind the end in."""
    new, old, mask, value_mask = micro_batch(number)
    policy, value = losses(new, old, settings)
    assert agree(policy[mask].mean(), new["pg_loss"])
    assert differ(value[mask].mean(), new["vf_loss"]) == (int(value_mask.sum()) > int(mask.sum()))
    assert agree(value[value_mask].mean(), new["vf_loss"])
    assert agree(policy[mask].mean() + settings["vf_coef"] * value[value_mask].mean(), new["loss"])


@pytest.mark.parametrize("number", MICRO_BATCHES)
def test_gradients_in_logprobs_and_values(number: int, settings: dict[str, float]) -> None:
    new, old, mask, value_mask = micro_batch(number)
    inputs = {name: new[name].clone().requires_grad_() for name in ("logprobs", "values")}
    policy, value = losses(inputs, old, settings)
    (policy[mask].mean() + settings["vf_coef"] * value[value_mask].mean()).backward()
    for name, tensor in inputs.items():
        assert tensor.grad is not None
        assert agree(tensor.grad, new[f"{name}_gradient"]), name


@pytest.mark.parametrize("step", [0, 1])
def test_gradients_in_the_weights(step: int, plain: Tensors, settings: dict[str, float]) -> None:
    """Of a whole step: TRL takes means over each micro-batch and their mean, we divide once by all the tokens."""
    ours, temperature = actor_critic(step), settings["temperature"] + 1e-7
    parts = []
    for number in (2 * step, 2 * step + 1):
        new, old, mask, _ = micro_batch(number)
        theirs = frame(plain, behind_the_end=True, rows=new["rows"])
        actions = ours(theirs.batch, temperature)
        in_our_layout = {name: theirs.ours(old[name]) for name in ("logprobs", "values", "returns", "advantages")}
        policy, value = losses({"logprobs": actions.logprobs, "values": actions.values}, in_our_layout, settings)
        parts.append((policy[theirs.ours(mask).bool()], settings["vf_coef"] * value[theirs.batch.mask]))
    mean_of_means = torch.stack([policy.mean() + value.mean() for policy, value in parts]).mean()
    policies, values = (torch.cat(column) for column in zip(*parts, strict=True))
    theirs_by_name = group(f"plain/step/{step}/gradient/")
    divided_once, divided_twice = (gradients(ours, loss) for loss in (policies.mean() + values.mean(), mean_of_means))
    assert theirs_by_name.keys() == divided_twice.keys()
    assert any(differ(divided_once[name], gradient) for name, gradient in theirs_by_name.items())
    far = {name: distance(divided_twice[name], gradient) for name, gradient in theirs_by_name.items()}
    assert max(far.values()) < FLOAT32, far


def gradients(ours: ActorCritic, loss: Tensor) -> Tensors:
    """By TRL's names; its score head is our value head."""
    assert ours.critic is not None
    weights = {f"policy/{name}": weight for name, weight in ours.policy.named_parameters()}
    weights |= {f"critic/{name}": weight for name, weight in ours.critic.named_parameters()}
    weights["critic/score.weight"] = ours.value_head.linear.weight
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values()), retain_graph=True), strict=True))


# Statistics


@pytest.mark.parametrize("number", UPDATED)
def test_approximate_kl(number: int) -> None:
    """TRL logs k2 as a mean over the padding too, where the ratio is 1; we log k3 over response actions."""
    new, old, mask, _ = micro_batch(number)
    k2 = estimates(new["logprobs"][mask], old["logprobs"][mask]).k2
    logged = group("plain/")["approxkl"][number]
    assert differ(k2.mean(), logged) == (not bool(mask.all()))
    assert agree(k2.sum() / mask.numel(), logged)


@pytest.mark.parametrize("number", UPDATED)
def test_clip_fraction(number: int, settings: dict[str, float]) -> None:
    """TRL counts the actions whose loss the clip raises, we count every ratio outside of the interval."""
    new, old, mask, _ = micro_batch(number)
    logprobs, old_logprobs, advantages = new["logprobs"][mask], old["logprobs"][mask], old["advantages"][mask]
    clip = settings["cliprange"]
    outside = clipped(logprobs, old_logprobs, clip, clip)
    unclipped = -torch.exp(logprobs - old_logprobs) * advantages
    raised = policy_losses(logprobs, old_logprobs, advantages, clip, clip) > unclipped
    logged = group("plain/")["pg_clipfrac"][number]
    assert differ(outside.double().mean(), logged)
    assert agree((outside & raised).double().mean(), logged)
