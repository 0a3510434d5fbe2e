"""The update: epochs of minibatches over one iteration's experience."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import AdamW

from rlhf.errors import UserError
from rlhf.models.actor_critic import ActorCritic
from rlhf.models.batches import micro_batches
from rlhf.params import Ppo
from rlhf.ppo.losses import clipped, policy_losses, value_losses
from rlhf.ppo.rollout import Experience
from rlhf.streams import Purpose, permutation
from rlhf.training.optimisation import adamw, clip_gradients

BAD_STEPS_ALLOWED = 2


class Learner:
    """The actor-critic with its optimisers: one if the trunk is shared, else one each, clipped apart."""

    def __init__(self, actor_critic: ActorCritic, settings: Ppo) -> None:
        self.actor_critic = actor_critic
        groups = actor_critic.optimised(settings.lr, settings.critic.lr)
        self.optimisers: list[AdamW] = [adamw(group, settings.lr, settings.weight_decay) for group in groups]
        self.bad_steps = 0

    def set_policy_lr(self, lr: float) -> None:
        """Sets the policy's learning rate; the critic's stays."""
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                if group["role"] == "policy":
                    group["lr"] = lr

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Puts the weights of `actor_critic.named_parameters()` back."""
        for name, parameter in self.actor_critic.named_parameters():
            parameter.copy_(weights[name])

    def step(self, max_grad_norm: float) -> float:
        """Clips and steps every optimiser, or none: returns the largest gradient norm, NaN if one is.

        Raises UserError at the third step in a row whose gradient is not finite; the weights are the last good ones.
        """
        norms = torch.tensor(
            [
                clip_gradients([p for group in optimiser.param_groups for p in group["params"]], max_grad_norm)
                for optimiser in self.optimisers
            ]
        )
        good = bool(norms.isfinite().all())
        self.bad_steps = 0 if good else self.bad_steps + 1
        if self.bad_steps > BAD_STEPS_ALLOWED:
            raise UserError(f"ppo.lr: the gradient was not finite {self.bad_steps} times in a row: lower ppo.lr")
        for optimiser in self.optimisers:
            if good:
                optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return float(norms.max())


@dataclass
class UpdateStats:
    """Sums over the response tokens that an update saw, the largest log ratio before its first step, and the gradient
    norm of its last one."""

    sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    steps: int = 0
    first_log_ratio: float = 0.0
    grad_norm: float = 0.0

    def add(self, tokens: int, **values: Tensor) -> None:
        """Adds per-action values that are 0 off the mask."""
        self.tokens += tokens
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.detach().sum(dtype=torch.float64))

    def means(self) -> dict[str, float]:
        """Means over tokens."""
        return {name: total / max(1, self.tokens) for name, total in self.sums.items()}


def update(
    learner: Learner, experience: Experience, settings: Ppo, *, seed: int, iteration: int, train_policy: bool
) -> UpdateStats:
    """`epochs` passes over the experience; the loss is a mean over a minibatch's response tokens, whatever the
    micro-batches. With `train_policy=False` (critic warm-up) the policy does not move."""
    stats = UpdateStats()
    device = experience.batch.tokens.device
    rows = len(experience.batch)
    for epoch in range(settings.epochs):
        keys = iteration * settings.epochs + epoch
        order = torch.from_numpy(permutation(seed, Purpose.SHUFFLE_MINIBATCHES, keys, rows)).to(device)
        for minibatch in order.split(rows // settings.minibatches):
            tokens = int(experience.batch.mask[minibatch].sum())
            for part in micro_batches(minibatch, settings.micro_batch_size):
                loss = _losses(learner.actor_critic, experience.select(part), settings, train_policy, stats)
                (loss / tokens).backward()
            stats.grad_norm = learner.step(settings.max_grad_norm)
            stats.steps += 1
    return stats


def _losses(
    actor_critic: ActorCritic, part: Experience, settings: Ppo, train_policy: bool, stats: UpdateStats
) -> Tensor:
    """The sum of the loss over the part's response tokens; adds the part to the statistics."""
    mask = part.batch.mask
    actions = actor_critic(part.batch, settings.sampling.temperature, train_policy)
    policy = policy_losses(actions.logprobs, part.logprobs, part.advantages, settings.clip) * mask
    value = value_losses(actions.values, part.values, part.returns, settings.value_clip) * mask
    log_ratio = (actions.logprobs - part.logprobs).detach()
    if stats.steps == 0:
        stats.first_log_ratio = max(stats.first_log_ratio, float(log_ratio.abs().max()))
    stats.add(
        int(mask.sum()),
        policy_loss=policy,
        value_loss=value,
        entropy=actions.entropy,
        approx_kl=(torch.expm1(log_ratio) - log_ratio) * mask,
        clip_fraction=clipped(actions.logprobs, part.logprobs, settings.clip) & mask,
    )
    value_loss = settings.value_coef * value.sum()
    if not train_policy:
        return value_loss
    return policy.sum() - settings.entropy_coef * actions.entropy.sum() + value_loss
