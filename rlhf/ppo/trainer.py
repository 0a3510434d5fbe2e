"""The PPO loop: sample, score, estimate advantages, update, validate, keep the best.

InstructGPT's third step (Ouyang et al., 2022) with a verifier or a reward model for the score. Everything that the loop
works on is handed in; what happens in an iteration stands in `train`, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.answers import is_correct
from rlhf.models.actor_critic import Actions, ActorCritic, Reference, sampling_copy
from rlhf.params import Params, Ppo
from rlhf.ppo.advantages import explained_variance
from rlhf.ppo.kl import next_coef
from rlhf.ppo.rewards import Scorer, task_scores
from rlhf.ppo.rollout import Experience, Prompt, Rollout, build_experience, evaluate_actions, sample, whiten_advantages
from rlhf.ppo.update import Learner, UpdateStats, update
from rlhf.streams import Purpose, shuffled_slice

Row = dict[str, float]
RATIO_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass
class Progress:
    """Where training stands: with the weights and the optimisers, all that it needs to go on.

    Attributes:
        iteration: iterations done.
        kl_coef: the KL coefficient of the next iteration.
        advantage_std: deviation of the last advantages whose task scores differed.
        best_iteration, best_accuracy: the selected policy.
        best_weights: its parameters, and its critic's, by name.
        rows: one row of metrics an iteration; row 0 is the policy before PPO.
    """

    iteration: int = 0
    kl_coef: float = 0.0
    advantage_std: float | None = None
    best_iteration: int = 0
    best_accuracy: float = -1.0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """What the loop works with; nothing of it is made here."""

    params: Params
    learner: Learner
    reference: Reference
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    validate: Callable[[ActorCritic], float]
    on_iteration: Callable[[Row], None]
    save: Callable[[Progress], None]


def train(loop: Loop, progress: Progress) -> Progress:
    """Runs the iterations that are left and returns where training stands; `save` is called after each."""
    settings, seed = loop.params.ppo, loop.params.seed
    actor_critic = loop.learner.actor_critic
    if not progress.rows:
        progress.kl_coef = settings.kl.coef
        _record(loop, progress, {"iteration": 0.0, "validation_accuracy": loop.validate(actor_critic)})
    while progress.iteration < settings.iterations:
        iteration = progress.iteration
        train_policy = iteration >= settings.critic.warmup_iterations
        rollout = _sample(loop, iteration)
        actions, ref_logprobs = evaluate_actions(
            actor_critic, loop.reference, rollout.batch, settings.sampling.temperature, settings.micro_batch_size
        )
        raw_scores = loop.scorer(rollout.problems, rollout.texts, rollout.batch)
        scores = task_scores(raw_scores, rollout.finished, settings.reward)
        experience = build_experience(
            rollout.batch,
            actions,
            ref_logprobs,
            scores,
            kl_coef=progress.kl_coef,
            gamma=settings.gamma,
            lam=settings.lam,
        )
        row = _measure(loop.params, rollout, actions, experience, scores)
        if settings.whiten_advantages:
            experience, progress.advantage_std = whiten_advantages(experience, scores, progress.advantage_std)
        lr = settings.lr * lr_share(settings, iteration)
        loop.learner.set_policy_lr(lr)
        stats = update(loop.learner, experience, settings, seed=seed, iteration=iteration, train_policy=train_policy)
        _warn(row, stats, actor_critic.dtype, iteration)
        row |= {"iteration": iteration + 1.0, "lr": lr, "kl_coef": progress.kl_coef, "grad_norm": stats.grad_norm}
        row |= stats.means() | {"first_log_ratio": stats.first_log_ratio}
        if train_policy:  # a policy that does not move has no KL to steer by
            progress.kl_coef = next_coef(progress.kl_coef, row["kl_sequence"], len(rollout.texts), settings.kl)
        progress.iteration += 1
        if progress.iteration % settings.eval_every == 0 or progress.iteration == settings.iterations:
            row["validation_accuracy"] = loop.validate(actor_critic)
        _record(loop, progress, row)
    return progress


def lr_share(settings: Ppo, iteration: int) -> float:
    """Share of the policy's peak learning rate: rises linearly over the warm-up that follows the critic's."""
    done = iteration - settings.critic.warmup_iterations
    return min(1.0, (done + 1) / (settings.warmup_iterations + 1)) if done >= 0 else 0.0


def _sample(loop: Loop, iteration: int) -> Rollout:
    settings, seed = loop.params.ppo, loop.params.seed
    start = iteration * settings.prompts_per_iteration
    numbers = shuffled_slice(seed, Purpose.SHUFFLE_PROMPTS, start, settings.prompts_per_iteration, len(loop.prompts))
    actor_critic = loop.learner.actor_critic
    return sample(
        sampling_copy(actor_critic.policy, actor_critic.dtype),
        loop.tokenizer,
        loop.prompts,
        numbers,
        settings.samples_per_prompt,
        settings.sampling,
        seed=seed,
        iteration=iteration,
    )


def _measure(params: Params, rollout: Rollout, actions: Actions, experience: Experience, scores: Tensor) -> Row:
    """What an iteration's rollouts say, before the update; means over response tokens or over sequences."""
    mask = rollout.batch.mask
    tokens, sequences = int(mask.sum()), len(rollout.texts)
    correct = [
        is_correct(text, problem.gold, params.verifier.method)
        for text, problem in zip(rollout.texts, rollout.problems, strict=True)
        if problem.gold is not None
    ]
    k1, k2, k3 = (float(k.sum(dtype=torch.float64)) for k in experience.kl)
    return {
        "score": float(scores.mean()),
        "score_std": float(scores.std(correction=0)),
        "accuracy": sum(correct) / len(correct) if correct else math.nan,
        "kl_token": k1 / tokens,
        "kl_sequence": k1 / sequences,
        "kl_k2": k2 / tokens,
        "kl_k3": k3 / tokens,
        "explained_variance": explained_variance(experience.values, experience.returns, mask),
        "response_length": tokens / sequences,
        "cut_off": 1 - float(rollout.finished.float().mean()),
        "mismatch": float((rollout.sampler_logprobs - actions.logprobs).abs().sum()) / tokens,
    }


def _record(loop: Loop, progress: Progress, row: Row) -> None:
    """Appends the row, keeps the policy if it is the best one validated, saves, and tells."""
    accuracy = row.get("validation_accuracy")
    if accuracy is not None and accuracy > progress.best_accuracy:
        progress.best_accuracy, progress.best_iteration = accuracy, progress.iteration
        progress.best_weights = {
            name: weight.detach().clone() for name, weight in loop.learner.actor_critic.named_parameters()
        }
    progress.rows.append(row)
    loop.save(progress)
    loop.on_iteration(row)


def _warn(row: Row, stats: UpdateStats, dtype: torch.dtype, iteration: int) -> None:
    """Says what makes an iteration worthless, in the iteration itself and not hours later."""
    repeatable = stats.first_log_ratio <= RATIO_TOLERANCE[dtype]  # False for nan as well
    alarms = {
        "all scores are equal, the policy cannot learn from them": row["score_std"] == 0,
        "every response was cut off: raise ppo.sampling.max_new_tokens": row["cut_off"] == 1,
        # The first minibatch sees the weights that made the old log-probabilities: its ratio must be 1.
        f"the first minibatch's log ratio is {stats.first_log_ratio:.2g}, not 0: "
        "the policy's forward pass is not repeatable": not repeatable,
    }
    for text, holds in alarms.items():
        if holds:
            print(f"train_ppo: iteration {iteration + 1}: {text}", flush=True)
