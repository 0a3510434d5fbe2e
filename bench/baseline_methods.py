"""What PPO is compared with, trained on as many responses to the same prompts: rejection sampling and RLOO.

Both are made of the pipeline's own parts, so that nothing but the method differs: PPO's prompts and random numbers, its
verifier, its clipped update, and the supervised fit of the warm start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.answers import Method, is_correct
from rlhf.models.actor_critic import ActorCritic, Reference
from rlhf.params import Params
from rlhf.ppo import setup
from rlhf.ppo.collect import sample_iteration
from rlhf.ppo.kl import estimates
from rlhf.ppo.rewards import task_scores
from rlhf.ppo.rollout import Experience, Prompt, Rollout, evaluate_actions
from rlhf.ppo.trainer import lr_share
from rlhf.ppo.update import Learner, update
from rlhf.runtime import matmul_dtype
from rlhf.training.sft import Demonstration, finetune

WARMUP_SHARE = 10
"""One step in so many of a supervised fit is warm-up."""


@dataclass(frozen=True)
class Task:
    """What a method trains with; it calls `validate` wherever PPO validates, after equal shares of its training."""

    params: Params
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    validate: Callable[[], None]


def sampled(task: Task, model: PreTrainedModel, iteration: int) -> Rollout:
    """What the model answers to the prompts of PPO's iteration, with the random numbers that PPO draws there."""
    return sample_iteration(model, task.tokenizer, task.prompts, task.params, iteration)


# Rejection sampling: imitate what came out right


def train_by_rejection(task: Task, model: PreTrainedModel, rounds: int, epochs: int) -> int:
    """Samples, keeps the right answers and fine-tunes on them with `sft.finetune`, `rounds` times, in place.

    One round imitates samples of the SFT policy (STaR, Zelikman et al., 2022; Yuan et al., 2023). In several, each
    samples from the policy as it is by then and goes on from it (expert iteration; RAFT, Dong et al., 2023). Each round
    passes `epochs` times over what it kept, with an optimiser and a schedule of its own. Returns the optimiser steps.
    """
    params, taken = task.params, 0
    validations = params.ppo.iterations // params.ppo.eval_every
    for number in range(rounds):
        first, last = (params.ppo.iterations * (number + end) // rounds for end in (0, 1))
        rollouts = [sampled(task, model, iteration) for iteration in range(first, last)]
        kept = right_answers(rollouts, params.verifier.method)
        steps = epochs * -(-len(kept) // params.sft.finetune.batch_size)

        def on_step(step: int, _: dict[str, float], done: int = number * steps, total: int = rounds * steps) -> None:
            if due(done + step + 1, total, validations):
                task.validate()

        finetune(
            model,
            kept,
            params.sft.finetune.model_copy(update={"steps": steps, "warmup_steps": steps // WARMUP_SHARE}),
            seed=params.seed,
            pad_id=task.tokenizer.eos_token_id,
            dtype=matmul_dtype(params.runtime),
            on_step=on_step,
        )
        taken += steps
    return taken


def right_answers(rollouts: Iterable[Rollout], method: Method) -> list[Demonstration]:
    """The responses that ended by themselves and are right under `method`; the same text to a question counts once."""
    kept: dict[tuple[str, str], Demonstration] = {}
    for rollout in rollouts:
        starts, ends = rollout.batch.prompt_lengths.tolist(), rollout.batch.lengths.tolist()
        for row, (problem, text) in enumerate(zip(rollout.problems, rollout.texts, strict=True)):
            if rollout.finished[row] and is_correct(text, problem.gold, method):
                tokens = rollout.batch.tokens[row].tolist()
                answer = Demonstration(tokens[: starts[row]], tokens[starts[row] : ends[row]])
                kept.setdefault((problem.question, text), answer)
    return list(kept.values())


def due(done: int, steps: int, parts: int) -> bool:
    """Whether the step that makes `done` of `steps` completes one of `parts` equal parts."""
    return done * parts // steps > (done - 1) * parts // steps


# RLOO: REINFORCE, where a response's baseline is what the others to the same prompt got


def train_by_rloo(task: Task, model: PreTrainedModel, reference: Reference) -> int:
    """REINFORCE with a leave-one-out baseline (Ahmadian et al., 2024, Back to Basics, section 3), in place.

    A whole response is one action, whose reward is the task score less `kl.coef` times its log ratio to the reference.
    Each response is seen `epochs` times in PPO's minibatches; from the second step on the ratio to the policy that
    sampled is no longer 1, and PPO's clip keeps it near. Returns the optimiser steps.
    """
    params, taken = task.params, 0
    settings = params.ppo.model_copy(update={"value_coef": 0.0})
    actor_critic = ActorCritic(model, None, matmul_dtype(params.runtime))  # the critic gets no loss and stays 0
    learner, scorer = Learner(actor_critic, settings), setup.scorer(None, params)
    for iteration in range(settings.iterations):
        rollout = sampled(task, model, iteration)
        scores = task_scores(scorer(rollout.problems, rollout.texts, rollout.batch), rollout.finished, settings.reward)
        evaluated = evaluate_actions(
            actor_critic, reference, rollout.batch, settings.sampling.temperature, settings.micro_batch_size
        )
        rewards = scores - settings.kl.coef * estimates(evaluated.logprobs, evaluated.ref_logprobs).k1.sum(dim=1)
        mask = rollout.batch.mask
        experience = Experience(
            batch=rollout.batch,
            **evaluated._asdict(),
            advantages=leave_one_out(rewards, settings.samples_per_prompt)[:, None] * mask,
            returns=evaluated.values,
            weights=mask.float(),
        )
        learner.set_policy_lr(settings.lr * lr_share(settings, iteration))
        taken += update(
            learner, experience, settings, seed=params.seed, iteration=iteration, kl_coef=0.0, train_policy=True
        ).steps
        if due(iteration + 1, settings.iterations, settings.iterations // settings.eval_every):
            task.validate()
    return taken


def leave_one_out(rewards: Tensor, samples: int) -> Tensor:
    """(B,) each reward less the mean of the others to its prompt; the `samples` rows of a prompt stand together.

    With the mean m of all k rewards of a prompt this is k / (k - 1) (r - m).
    """
    if samples < 2:
        raise ValueError("leaving one out leaves nothing of one sample a prompt")
    groups = rewards.view(-1, samples)
    return ((groups - groups.mean(dim=1, keepdim=True)) * samples / (samples - 1)).view(-1)
