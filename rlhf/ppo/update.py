"""The update: epochs of minibatches over one iteration's experience."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from rlhf.distributed import ALONE, Ranks
from rlhf.errors import UserError
from rlhf.models.actor_critic import ActorCritic
from rlhf.models.batches import TokenBatch, by_length, micro_batches
from rlhf.models.sharding import is_sharded, part_like
from rlhf.params import Ppo
from rlhf.ppo.kl import kl_losses
from rlhf.ppo.losses import clipped, policy_losses, value_losses
from rlhf.ppo.rollout import Experience
from rlhf.streams import Purpose, permutation
from rlhf.training.optimisation import adamw, clip_gradients
from rlhf.training.replicas import replicated

BAD_STEPS_ALLOWED = 2


class Learner:
    """The actor-critic with its optimisers: one if the trunk is shared, else one each, clipped apart.

    Where several ranks train, each has such a learner, and a minibatch's gradient is that of all ranks' rows.
    """

    def __init__(self, actor_critic: ActorCritic, settings: Ppo, ranks: Ranks = ALONE) -> None:
        self.actor_critic = actor_critic
        self.ranks = ranks
        alone = ranks.size == 1 or is_sharded(actor_critic)  # what is sharded averages its gradients by itself
        self._synchronised = actor_critic if alone else replicated(actor_critic)
        groups = actor_critic.optimised(settings.lr, settings.critic.lr)
        self.optimisers: list[AdamW] = [adamw(group, settings.lr, settings.weight_decay) for group in groups]
        self.bad_steps = 0

    def module(self, last: bool) -> nn.Module:
        """What a micro-batch goes through forwards: for the `last` one of a minibatch, the actor-critic whose backward
        pass averages the gradients over the ranks, those of the micro-batches before included."""
        return self._synchronised if last else self.actor_critic

    def set_policy_lr(self, lr: float) -> None:
        """Sets the policy's learning rate; the critic's stays."""
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                if group["role"] == "policy":
                    group["lr"] = lr

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Puts the weights of `actor_critic.trained_parameters()` back."""
        for name, parameter in self.actor_critic.trained_parameters():
            parameter.copy_(part_like(parameter, weights[name]))

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
        if good:
            for optimiser in self.optimisers:
                optimiser.step()
        self.drop()
        return float(norms.max())

    def drop(self) -> None:
        """Forgets the gradients."""
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)


@dataclass
class UpdateStats:
    """Sums over the response tokens that an update saw.

    Attributes:
        sums, tokens: of per-action values, and the tokens they are of.
        steps: optimiser steps taken, and minibatches dropped for `target_kl`.
        stopped: `target_kl` ended the update.
        log_ratio, log_ratios: of a minibatch, the largest |log ratio| of the policy to the one that sampled, and
            their sum.
        grad_norm: of the last step.
        ptx_loss: the supervised loss of the last minibatch, nats a token.
    """

    sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    steps: int = 0
    stopped: bool = False
    log_ratio: float = 0.0
    log_ratios: float = 0.0
    grad_norm: float = 0.0
    ptx_loss: float = 0.0

    def add(self, tokens: int, **values: Tensor | float) -> None:
        """Adds per-action values that are 0 off the mask, or their sums."""
        self.tokens += tokens
        for name, value in values.items():
            total = value if isinstance(value, float) else float(value.detach().sum(dtype=torch.float64))
            self.sums[name] = self.sums.get(name, 0.0) + total

    def over(self, ranks: Ranks) -> UpdateStats:
        """What all ranks saw."""
        tokens, log_ratios, *totals = ranks.sum([self.tokens, self.log_ratios, *self.sums.values()])
        (log_ratio,) = ranks.max([self.log_ratio])
        sums = dict(zip(self.sums, totals, strict=True))
        return replace(self, sums=sums, tokens=int(tokens), log_ratio=log_ratio, log_ratios=log_ratios)

    def means(self) -> dict[str, float]:
        """Means over tokens."""
        return {name: total / max(1, self.tokens) for name, total in self.sums.items()}


def update(
    learner: Learner,
    experience: Experience,
    settings: Ppo,
    *,
    seed: int,
    iteration: int,
    kl_coef: float,
    train_policy: bool,
    demonstrations: TokenBatch | None = None,
    on_minibatch: Callable[[int, UpdateStats], None] = lambda _number, _seen: None,
) -> UpdateStats:
    """`epochs` passes over the experience; the loss is a mean over a minibatch's response tokens, whatever the
    micro-batches. With `train_policy=False` (critic warm-up) the policy does not move.

    `kl_coef` weighs the KL in the loss, where `kl.place` puts it there. `demonstrations` (PPO-ptx) are as many rows as
    the experience has: each minibatch takes its share of them. A minibatch whose approximate KL to the old policy
    exceeds `target_kl` is dropped, and the rest of the update with it, critic included. `on_minibatch` is told each
    minibatch's number in this update and what was seen of it, before its step.
    """
    stats = UpdateStats()
    device = experience.batch.tokens.device
    rows = len(experience.batch)
    for epoch in range(settings.epochs):
        keys = iteration * settings.epochs + epoch
        order = torch.from_numpy(permutation(seed, Purpose.SHUFFLE_MINIBATCHES, keys, rows)).to(device)
        for minibatch in order.split(rows // settings.minibatches):
            if train_policy and demonstrations is not None:
                stats.ptx_loss = _imitate(learner, demonstrations.select(minibatch), settings)
            seen = _accumulate(learner, experience, minibatch, settings, kl_coef, train_policy)
            stats.add(seen.tokens, **seen.sums)
            on_minibatch(stats.steps, seen)
            if train_policy and settings.target_kl is not None and seen.means()["approx_kl"] > settings.target_kl:
                learner.drop()
                stats.stopped = True
                return stats
            stats.grad_norm = learner.step(settings.max_grad_norm)
            stats.steps += 1
    return stats


def _accumulate(
    learner: Learner,
    experience: Experience,
    minibatch: Tensor,
    settings: Ppo,
    kl_coef: float,
    train_policy: bool,
) -> UpdateStats:
    """Adds the gradient of the minibatch's loss, micro-batch by micro-batch of this rank's share, and returns what all
    ranks saw."""
    seen, ranks = UpdateStats(), learner.ranks
    tokens = int(experience.batch.mask[minibatch].sum())
    mine = minibatch[ranks.share(len(minibatch))]
    parts = list(by_length(experience.batch, mine, settings.micro_batch_size))
    for number, rows in enumerate(parts):
        module = learner.module(last=number + 1 == len(parts))
        loss = _losses(module, experience.select(rows), settings, kl_coef, train_policy, seen)
        (loss / tokens * ranks.size).backward()  # the ranks' gradients are averaged
    return seen.over(ranks)


def _losses(
    actor_critic: nn.Module,
    part: Experience,
    settings: Ppo,
    kl_coef: float,
    train_policy: bool,
    seen: UpdateStats,
) -> Tensor:
    """The sum of the loss over the part's response tokens; adds the part to the statistics."""
    mask = part.batch.mask
    actions = actor_critic(part.batch, settings.sampling.temperature, train_policy, part.kept)
    trust = settings.clip_low, settings.clip_high
    surrogate = policy_losses(actions.logprobs, part.logprobs, part.advantages, *trust, settings.dual_clip)
    policy = surrogate * part.weights * mask
    value = value_losses(actions.values, part.values, part.returns, settings.value_clip) * mask
    log_ratio = (actions.logprobs - part.logprobs).detach()
    seen.log_ratio = float(log_ratio.abs().max().clamp(min=seen.log_ratio))  # unlike max(), keeps a NaN
    seen.log_ratios += float(log_ratio.abs().sum())
    seen.add(
        int(mask.sum()),
        policy_loss=policy,
        value_loss=value,
        entropy=actions.entropy,
        approx_kl=(torch.expm1(log_ratio) - log_ratio) * mask,
        clip_fraction=clipped(actions.logprobs, part.logprobs, *trust) & mask,
    )
    value_loss = settings.value_coef * value.sum()
    if not train_policy:
        return value_loss
    loss = policy.sum() - settings.entropy_coef * actions.entropy.sum() + value_loss
    if settings.kl.place == "loss":
        kl = kl_losses(settings.kl.estimator, actions.logprobs, part.logprobs, part.ref_logprobs)
        loss = loss + kl_coef * (kl * part.weights * mask).sum()
    return loss


def _imitate(learner: Learner, demonstrations: TokenBatch, settings: Ppo) -> float:
    """Adds the gradient of `ptx_coef` times the supervised loss (Ouyang et al., 2022, eq. 2) on this rank's share;
    returns that loss of all ranks, in nats a token."""
    ranks = learner.ranks
    tokens, total = int(demonstrations.mask.sum()), 0.0
    share = torch.arange(len(demonstrations), device=demonstrations.lengths.device)[ranks.share(len(demonstrations))]
    for rows in micro_batches(share, settings.micro_batch_size):
        loss = -learner.actor_critic.policy_logprobs(demonstrations.select(rows), 1.0).logprobs.sum() / tokens
        (settings.ptx_coef * loss * ranks.size).backward()
        total += float(loss.detach())
    return ranks.sum([total])[0]
