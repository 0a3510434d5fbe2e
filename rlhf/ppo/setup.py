"""What the loop works with, built from checkpoints and params: actor-critic, reference, scorer, prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.gsm8k import Problem
from rlhf.data.prompts import encode_prompts, encode_response
from rlhf.distributed import ALONE, Ranks
from rlhf.errors import UserError
from rlhf.evaluation.accuracy import Graded, accuracy, evaluate_model
from rlhf.models.actor_critic import ActorCritic, Reference, checkpoint_layers, rounded
from rlhf.models.batches import pad
from rlhf.models.checkpoints import MANIFEST, load_policy, load_reward_model, read_manifest
from rlhf.models.lora import add_adapter, has_adapter
from rlhf.models.reward_model import Normalisation
from rlhf.models.sharding import is_sharded, shard, whole
from rlhf.params import Params
from rlhf.ppo.panel import Validation, panel_of
from rlhf.ppo.rewards import MixtureScorer, RewardModelScorer, Scorer, VerifierScorer, task_scores
from rlhf.ppo.rollout import Prompt
from rlhf.runtime import device, matmul_dtype
from rlhf.training.sft import Demonstration


def actor_critic(sft: Path, reward_model: Path | None, params: Params) -> ActorCritic:
    """The policy from the SFT checkpoint, with the critic that `ppo.critic` describes.

    A critic that starts from the reward model begins with its normalised score as the value (Ouyang et al., 2022).
    """
    settings, dtype = params.ppo, matmul_dtype(params.runtime)
    policy = load_policy(sft)
    if settings.lora.rank:
        add_adapter(policy, settings.lora, params.seed)
    if settings.critic.start == "reward_model" and reward_model is not None:
        model = load_reward_model(reward_model)
        made = ActorCritic(policy, model.base_model, dtype)
        made.value_head.start_from(model.score.weight, *normalisation(reward_model))
    else:
        separate = settings.critic.kind == "separate"
        made = ActorCritic(policy, load_policy(sft).base_model if separate else None, dtype)
    if settings.gradient_checkpointing:
        checkpoint_layers(made)
    if shards(params):
        shard(made, device(params.runtime), ["policy_logprobs", "state_values", "sampling"])
    return made.to(device(params.runtime))


def shards(params: Params) -> bool:
    """Whether each process holds a part of the models that PPO trains, and of the reference."""
    return params.distributed.strategy == "fsdp" and params.distributed.processes > 1


@torch.no_grad()
def whole_policy(sft: Path, actor_critic: ActorCritic) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The policy and its value head's weights, put together where they are sharded: then for all ranks to call."""
    if not is_sharded(actor_critic):
        return actor_critic.policy, actor_critic.value_head.state_dict()
    weights = {name: whole(parameter) for name, parameter in actor_critic.named_parameters()}
    policy = load_policy(sft)
    for name, parameter in policy.named_parameters():
        parameter.copy_(weights[f"policy.{name}"])
    head = "value_head."
    return policy, {name.removeprefix(head): tensor for name, tensor in weights.items() if name.startswith(head)}


def reference(sft: Path, policy: PreTrainedModel, params: Params) -> Reference:
    """The frozen SFT policy, which a policy with an adapter holds in itself."""
    dtype = matmul_dtype(params.runtime)
    model = policy if has_adapter(policy) else load_policy(sft)
    if model is not policy and not shards(params):
        model = rounded(model, dtype)
    made = Reference(model, dtype)
    if shards(params):
        shard(made, device(params.runtime), ["logprobs"])
    return made.to(device(params.runtime))


def scorer(reward_model: Path | None, params: Params) -> Scorer:
    """The scorer that `ppo.reward.source` names; `reward_model` is its checkpoint where it uses one."""
    settings = params.ppo.reward
    verifier = VerifierScorer(params.verifier.method, settings.format_bonus)
    if reward_model is None or settings.source == "verifier":
        return verifier
    learned = reward_model_scorer(reward_model, params)
    if settings.source == "reward_model":
        return learned
    return MixtureScorer([(settings.verifier_weight, verifier), (settings.reward_model_weight, learned)])


def selection_scorer(reward_model: Path | None, params: Params) -> RewardModelScorer | None:
    """The reward model where `ppo.selection` looks at its score."""
    if reward_model is None or params.ppo.selection == "verifier":
        return None
    return reward_model_scorer(reward_model, params)


def reward_model_scorer(reward_model: Path, params: Params) -> RewardModelScorer:
    """The reward model with the normalisation that its manifest keeps."""
    size, dtype = params.ppo.micro_batch_size, matmul_dtype(params.runtime)
    model = rounded(load_reward_model(reward_model), dtype).to(device(params.runtime))
    return RewardModelScorer(model, normalisation(reward_model), size, dtype)


def normalisation(reward_model: Path) -> Normalisation:
    """The mean and deviation of the reward model's score over SFT samples, which its manifest keeps.

    Raises UserError where it does not.
    """
    kept = read_manifest(reward_model).extra.get("normalisation")
    if not isinstance(kept, dict) or kept.keys() != set(Normalisation._fields):
        raise UserError(
            f"{reward_model / MANIFEST}: extra.normalisation lacks the score's mean and std: run dvc repro train_reward"
        )
    return Normalisation(**kept)


def prompts(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, params: Params) -> list[Prompt]:
    """The problems whose prompt is at most `prompt.max_tokens` long; raises UserError where none is."""
    encoded = encode_prompts(tokenizer, [problem.question for problem in problems], params.prompt)
    fitting = [Prompt(p, tokens) for p, tokens in zip(problems, encoded, strict=True) if tokens is not None]
    if not fitting:
        raise UserError(f"prompt.max_tokens={params.prompt.max_tokens}: no train problem fits: raise it")
    return fitting


def demonstrations(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
    """What PPO-ptx imitates: the same problems' demonstrations."""
    return [Demonstration(p.tokens, encode_response(tokenizer, p.problem.demonstration)) for p in prompts]


def validation(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    scorer: RewardModelScorer | None,
    params: Params,
    ranks: Ranks = ALONE,
) -> Callable[[ActorCritic], Validation]:
    """What PPO calls to validate: the share of right greedy answers, with a scorer their mean score, and the panel.

    Each rank answers its share of the problems. Raises UserError where no prompt is short enough: each answer would
    count as wrong, and no iteration as better than the start.
    """
    if not any(encode_prompts(tokenizer, [problem.question for problem in problems], params.prompt)):
        raise UserError(f"prompt.max_tokens={params.prompt.max_tokens}: no validation problem fits: raise it")
    panel = panel_of(problems, params.ppo.panel)
    share = problems[ranks.share(len(problems))]

    def validate(actor_critic: ActorCritic) -> Validation:
        mine = actor_critic.sampling(lambda model: evaluate_model(model, tokenizer, share, params))
        graded = [row for part in ranks.gather(mine) for row in part]
        numbers = {"validation_accuracy": accuracy(graded)}
        if scorer is not None:
            scores = torch.cat(ranks.gather(_scores(mine, share, tokenizer.eos_token_id, scorer, params)))
            numbers["validation_score"] = float(scores.mean())
        return Validation(numbers, [graded[number] for number in panel])

    return validate


def _scores(
    graded: Sequence[Graded],
    problems: Sequence[Problem],
    pad_id: int,
    scorer: RewardModelScorer,
    params: Params,
) -> Tensor:
    """The task score of each response, on the CPU; one that was cut off counts `cut_off_score`, as in a rollout."""
    answered = [(row, problem) for row, problem in zip(graded, problems, strict=True) if row.tokens]
    rows, asked = [row for row, _ in answered], [problem for _, problem in answered]
    if not rows:
        return torch.zeros(0)
    batch = pad([row.prompt for row in rows], [row.tokens for row in rows], pad_id)
    scores = scorer(asked, [row.response for row in rows], batch.to(device(params.runtime)))
    finished = torch.tensor([row.finished for row in rows], device=scores.device)
    return task_scores(scores, finished, params.ppo.reward).cpu()
