"""What the loop works with, built from checkpoints and params: actor-critic, reference, scorer, prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf.data.gsm8k import Problem
from rlhf.data.prompts import encode_prompts
from rlhf.errors import UserError
from rlhf.models.actor_critic import ActorCritic, Reference
from rlhf.models.checkpoints import load_policy, load_reward_model, read_manifest
from rlhf.models.reward_model import Normalisation
from rlhf.params import Params
from rlhf.ppo.rewards import MixtureScorer, RewardModelScorer, Scorer, VerifierScorer
from rlhf.ppo.rollout import Prompt
from rlhf.runtime import device, matmul_dtype


def actor_critic(sft: Path, params: Params) -> ActorCritic:
    """The policy from the SFT checkpoint, with the critic that `ppo.critic.kind` names."""
    place = device(params.runtime)
    critic = load_policy(sft).to(place) if params.ppo.critic.kind == "separate" else None
    return ActorCritic(load_policy(sft).to(place), critic, matmul_dtype(params.runtime))


def reference(sft: Path, params: Params) -> Reference:
    """The frozen SFT policy."""
    return Reference(load_policy(sft).to(device(params.runtime)), matmul_dtype(params.runtime))


def scorer(reward_model: Path | None, params: Params) -> Scorer:
    """The scorer that `ppo.reward.source` names; `reward_model` is its checkpoint where it uses one."""
    settings = params.ppo.reward
    verifier = VerifierScorer(params.verifier.method, settings.format_bonus)
    if reward_model is None:
        return verifier
    model = load_reward_model(reward_model).to(device(params.runtime))
    normalisation = Normalisation(**read_manifest(reward_model).extra["normalisation"])
    learned = RewardModelScorer(model, normalisation, params.ppo.micro_batch_size, matmul_dtype(params.runtime))
    if settings.source == "reward_model":
        return learned
    return MixtureScorer([(settings.verifier_weight, verifier), (settings.reward_model_weight, learned)])


def prompts(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, params: Params) -> list[Prompt]:
    """The problems whose prompt is at most `prompt.max_tokens` long; raises UserError where none is."""
    encoded = encode_prompts(tokenizer, [problem.question for problem in problems], params.prompt)
    fitting = [Prompt(p, tokens) for p, tokens in zip(problems, encoded, strict=True) if tokens is not None]
    if not fitting:
        raise UserError(f"prompt.max_tokens={params.prompt.max_tokens}: no train problem fits: raise it")
    return fitting
