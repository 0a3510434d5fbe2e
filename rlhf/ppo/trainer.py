"""The PPO loop: sample, score, estimate advantages, update, validate, keep the best.

InstructGPT's third step (Ouyang et al., 2022) with a verifier or a reward model for the score. Everything that the loop
works on is handed in; what happens in an iteration stands in `train`, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf import faults
from rlhf.distributed import tells_of_a_lost_rank
from rlhf.errors import UserError
from rlhf.models.actor_critic import ActorCritic, Reference
from rlhf.models.batches import TokenBatch, pad
from rlhf.params import Params, Ppo
from rlhf.ppo import guards, metrics
from rlhf.ppo.collect import Collected, gathered, sample_iteration
from rlhf.ppo.debug import Case
from rlhf.ppo.guards import Alarm
from rlhf.ppo.kl import next_coef
from rlhf.ppo.metrics import Row
from rlhf.ppo.panel import PanelAnswer, Validation, panel_answers
from rlhf.ppo.rewards import Scorer, task_scores, whiten_scores
from rlhf.ppo.rollout import (
    Experience,
    Prompt,
    build_experience,
    correct_for_sampler,
    evaluate_actions,
    whiten_advantages,
)
from rlhf.ppo.update import Learner, UpdateStats, update
from rlhf.streams import Purpose, shuffled_slice
from rlhf.training.optimisation import FINAL_LR_SHARE
from rlhf.training.sft import Demonstration

SELECTED = {"verifier": "validation_accuracy", "reward_model": "validation_score"}
"""The number of a validation that `ppo.selection` looks at."""


@dataclass
class Progress:
    """Where training stands: with the weights and the optimisers, all that it needs to go on.

    Attributes:
        iteration: iterations done.
        kl_coef: the KL coefficient of the next iteration.
        advantage_std: deviation of the last advantages whose task scores differed.
        best_iteration, best_value: the selected policy, and what selection saw of it.
        best_weights: its trained parameters, and its critic's, by name.
        panel: the panel's answers at each validation.
        rows: one row of metrics an iteration; row 0 is the policy before PPO.
    """

    iteration: int = 0
    kl_coef: float = 0.0
    advantage_std: float | None = None
    best_iteration: int = 0
    best_value: float = -math.inf
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    panel: list[PanelAnswer] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """What the loop works with; nothing of it is made here.

    Attributes:
        validate: the policy's `validation_accuracy`, and its `validation_score` where selection looks at it; with
            the panel's answers.
        on_alarm: is told of each alarm, and of what ends training, with what the update works on.
    """

    params: Params
    learner: Learner
    reference: Reference
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    demonstrations: Sequence[Demonstration]
    validate: Callable[[ActorCritic], Validation]
    on_iteration: Callable[[Row], None]
    save: Callable[[Progress], None]
    on_alarm: Callable[[Alarm, Case], None] = lambda _alarm, _case: None


def train(loop: Loop, progress: Progress) -> Progress:
    """Runs the iterations that are left and returns where training stands; `save` is called after each.

    Raises UserError where a fatal alarm rings; what was saved before is intact.
    """
    settings, seed = loop.params.ppo, loop.params.seed
    if not progress.rows:
        progress.kl_coef = settings.kl.coef
        _record(loop, progress, {"iteration": 0.0} | _validate(loop, progress))
    while progress.iteration < settings.iterations:
        iteration = progress.iteration
        train_policy = iteration >= settings.critic.warmup_iterations
        collected = gathered(_collect(loop, iteration), loop.learner.ranks)
        rollout, scores = collected.rollout, collected.scores
        experience = _experience(loop, collected, progress.kl_coef)
        row = metrics.of_rollout(loop.params, rollout, experience, scores)
        if settings.whiten_advantages:
            experience, progress.advantage_std = whiten_advantages(experience, scores, progress.advantage_std)
        demonstrations = _demonstrations(loop, iteration, len(rollout.texts))
        case = Case(iteration, row, rollout, experience, scores, progress.kl_coef, train_policy, demonstrations)
        _heed(loop, guards.of_rollout(row, settings), case)
        lr = settings.lr * lr_share(settings, iteration)
        loop.learner.set_policy_lr(lr)
        with _failure_told(loop, case):
            stats = update(
                loop.learner,
                experience,
                settings,
                seed=seed,
                iteration=iteration,
                kl_coef=progress.kl_coef,
                train_policy=train_policy,
                demonstrations=demonstrations,
                on_minibatch=partial(_check, loop, case),
            )
        row |= {"iteration": iteration + 1.0, "lr": lr, "kl_coef": progress.kl_coef} | metrics.of_update(stats)
        if train_policy:  # a policy that does not move has no KL to steer by
            progress.kl_coef = next_coef(progress.kl_coef, row["kl_sequence"], len(rollout.texts), settings.kl)
        progress.iteration += 1
        if progress.iteration % settings.eval_every == 0 or progress.iteration == settings.iterations:
            row |= _validate(loop, progress)
        _record(loop, progress, row)
    return progress


def lr_share(settings: Ppo, iteration: int) -> float:
    """Share of the policy's peak learning rate: 0 in the critic's warm-up, then a linear rise, then the schedule's
    fall to `FINAL_LR_SHARE`."""
    done = iteration - settings.critic.warmup_iterations
    if done < 0:
        return 0.0
    if done < settings.warmup_iterations:
        return (done + 1) / (settings.warmup_iterations + 1)
    left = settings.iterations - settings.critic.warmup_iterations - settings.warmup_iterations
    fallen = (done - settings.warmup_iterations) / max(1, left - 1)
    if settings.lr_schedule == "linear":
        return 1 - (1 - FINAL_LR_SHARE) * fallen
    if settings.lr_schedule == "cosine":
        return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * (1 + math.cos(math.pi * fallen)) / 2
    return 1.0


def _collect(loop: Loop, iteration: int) -> Collected:
    """This rank's share of the iteration's rows, sampled, scored and evaluated."""
    settings, actor_critic = loop.params.ppo, loop.learner.actor_critic
    rollout = actor_critic.sampling(
        lambda model: sample_iteration(
            model, loop.tokenizer, loop.prompts, loop.params, iteration, ranks=loop.learner.ranks
        )
    )
    scores = loop.scorer(rollout.problems, rollout.texts, rollout.batch)
    evaluated = evaluate_actions(
        actor_critic,
        loop.reference,
        rollout.batch,
        settings.sampling.temperature,
        settings.micro_batch_size,
        rollout.kept,
        rollout.sampler_logprobs if settings.old_logprobs == "sampler" else None,
    )
    return Collected(rollout, task_scores(scores, rollout.finished, settings.reward), evaluated)


def _experience(loop: Loop, collected: Collected, kl_coef: float) -> Experience:
    """The rollout with all that the update needs of the models, before its advantages are whitened."""
    settings, actor_critic = loop.params.ppo, loop.learner.actor_critic
    rollout, scores = collected.rollout, collected.scores
    if settings.reward.whiten:
        scores = whiten_scores(scores)
    coef = kl_coef if settings.kl.place == "reward" else 0.0
    experience = build_experience(rollout, collected.evaluated, scores, settings, coef)
    differs = actor_critic.dtype != actor_critic.policy.dtype  # the sampler's weights are rounded, see sampling_copy
    if settings.importance == "on" or (settings.importance == "auto" and differs):
        experience = correct_for_sampler(experience, rollout, settings.importance_cap)
    return experience


def _demonstrations(loop: Loop, iteration: int, count: int) -> TokenBatch | None:
    """The next `count` demonstrations for PPO-ptx; None where it is off."""
    if not loop.params.ppo.ptx_coef:
        return None
    rows = shuffled_slice(loop.params.seed, Purpose.SHUFFLE_PTX, iteration * count, count, len(loop.demonstrations))
    chosen = [loop.demonstrations[row] for row in rows.tolist()]
    batch = pad([d.prompt for d in chosen], [d.response for d in chosen], loop.tokenizer.eos_token_id)
    return batch.to(loop.learner.actor_critic.policy.device)


def _heed(loop: Loop, alarms: Sequence[Alarm], case: Case) -> None:
    """Says what is wrong, and stops where going on would spoil the policy."""
    for alarm in alarms:
        print(f"train_ppo: iteration {case.iteration + 1}: {alarm.text}", flush=True)
        loop.on_alarm(alarm, case)
    if fatal := next((alarm for alarm in alarms if alarm.fatal), None):
        raise UserError(f"iteration {case.iteration + 1}: {fatal.text}")


def _check(loop: Loop, case: Case, number: int, seen: UpdateStats) -> None:
    """Notes how far the update has come; the first minibatch, whose weights are the rollout's, is checked."""
    case.row["steps"] = float(number)
    if number == 0:
        case.row.update(metrics.of_first_minibatch(seen, loop.params.ppo))
        _heed(loop, guards.of_update(case.row, loop.learner.actor_critic.dtype), case)


@contextmanager
def _failure_told(loop: Loop, case: Case) -> Iterator[None]:
    """Tells `on_alarm` of what ends the update: gradients that are not finite, or an error that nobody expected."""
    try:
        yield
    except Exception as error:
        if tells_of_a_lost_rank(error):
            raise
        name = "gradient" if isinstance(error, UserError) else "error"
        loop.on_alarm(Alarm(name, str(error) or type(error).__name__, fatal=True), case)
        raise


def _validate(loop: Loop, progress: Progress) -> Row:
    """The numbers of a validation; the panel's answers are kept."""
    found = loop.validate(loop.learner.actor_critic)
    progress.panel += panel_answers(progress.iteration, found.panel)
    return found.numbers


def _record(loop: Loop, progress: Progress, row: Row) -> None:
    """Appends the row, keeps the policy if it is the best one validated, saves, and tells."""
    value = row.get(SELECTED[loop.params.ppo.selection])
    if value is not None and value > progress.best_value:
        progress.best_value, progress.best_iteration = value, progress.iteration
        progress.best_weights = {
            name: weight.detach().clone() for name, weight in loop.learner.actor_critic.trained_parameters()
        }
        faults.reach("best.kept")
    progress.rows.append(row)
    loop.save(progress)
    loop.on_iteration(row)
