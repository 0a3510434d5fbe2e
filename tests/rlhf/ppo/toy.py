"""PPO at toy size: a random Llama of 48 tokens, prompts without meaning, and a scorer that wants low token numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config import compose, validate
from rlhf.data.gsm8k import Problem
from rlhf.distributed import ALONE, Ranks
from rlhf.evaluation.accuracy import Graded
from rlhf.models.actor_critic import ActorCritic, Reference, checkpoint_layers
from rlhf.models.batches import TokenBatch
from rlhf.models.lora import add_adapter, has_adapter
from rlhf.models.sharding import shard, whole
from rlhf.params import Params
from rlhf.ppo.debug import Case
from rlhf.ppo.guards import Alarm
from rlhf.ppo.metrics import Row
from rlhf.ppo.panel import Validation
from rlhf.ppo.rollout import Experience, Prompt, build_experience, evaluate_actions, sample
from rlhf.ppo.trainer import Loop, Progress
from rlhf.ppo.update import Learner
from rlhf.training.sft import Demonstration
from tests.tiny_models import VOCABULARY, random_tokens, tiny_model, tiny_tokenizer

PROMPTS = 20


@cache
def toy_params(*overrides: str) -> Params:
    """Eight prompts an iteration, two responses each, at most eight tokens long."""
    sizes = ("ppo.iterations=3", "ppo.sampling.max_new_tokens=8", "ppo.sampling.batch_size=16", "ppo.lr=0.01")
    return validate(compose(["scale=smoke", "runtime.threads=1", *sizes, *overrides]))


@cache
def tokenizer():  # type: ignore[no-untyped-def]
    return tiny_tokenizer()


def toy_prompts() -> list[Prompt]:
    lengths = [1 + number % 5 for number in range(PROMPTS)]
    return [
        Prompt(Problem(f"question {number}", "#### 1", "1", "#### 1", 1, "test"), tokens)
        for number, tokens in enumerate(random_tokens(lengths, seed=3))
    ]


def toy_demonstrations() -> list[Demonstration]:
    """Responses of the highest tokens, which the scorer does not want."""
    return [Demonstration(prompt.tokens, [VOCABULARY - 1] * 3) for prompt in toy_prompts()]


def toy_actor_critic(params: Params, ranks: Ranks = ALONE) -> ActorCritic:
    critic = tiny_model(spread=2.0).base_model if params.ppo.critic.kind == "separate" else None
    policy = tiny_model(spread=2.0)
    if params.ppo.lora.rank:
        add_adapter(policy, params.ppo.lora, params.seed)
    made = ActorCritic(policy, critic, torch.float32)
    if params.ppo.gradient_checkpointing:
        checkpoint_layers(made)
    if params.distributed.strategy == "fsdp" and ranks.size > 1:
        shard(made, torch.device("cpu"), ["policy_logprobs", "state_values", "sampling"])
    return made


def toy_reference(policy: PreTrainedModel, params: Params, ranks: Ranks) -> Reference:
    made = Reference(policy if has_adapter(policy) else tiny_model(spread=2.0), torch.float32)
    if params.distributed.strategy == "fsdp" and ranks.size > 1:
        shard(made, torch.device("cpu"), ["logprobs"])
    return made


def low_tokens(problems: Sequence[Problem], texts: Sequence[str], batch: TokenBatch) -> Tensor:
    """The share of response tokens in the lower half of the vocabulary."""
    low = (batch.tokens[:, 1:] < VOCABULARY // 2) & batch.mask
    return low.sum(dim=1) / batch.mask.sum(dim=1)


def weight_score(actor_critic: ActorCritic) -> float:
    """A validation that any change of the policy moves."""
    return 0.5 + 0.1 * float(torch.sin(sum(whole(p.detach()).double().sum() for p in actor_critic.policy.parameters())))


def validation(accuracy: float) -> Validation:
    """With a panel of one problem, whose answer is the accuracy."""
    answer = Graded("q", "1", f"{accuracy}\nß", False, False, False, True, True, [3], [4], False)
    return Validation({"validation_accuracy": accuracy}, [answer])


@dataclass
class Toy:
    """A loop with what it told and saved."""

    params: Params
    scorer: Callable[..., Tensor] = low_tokens
    validate: Callable[[ActorCritic], float] = weight_score
    save: Callable[[Learner, Progress], None] = lambda learner, progress: None
    on_iteration: Callable[[Row], None] = lambda row: None
    on_alarm: Callable[[Alarm, Case], None] = lambda alarm, case: None
    ranks: Ranks = ALONE
    learner: Learner = field(init=False)

    def __post_init__(self) -> None:
        self.learner = Learner(toy_actor_critic(self.params, self.ranks), self.params.ppo, self.ranks)

    def loop(self) -> Loop:
        policy = self.learner.actor_critic.policy
        return Loop(
            params=self.params,
            learner=self.learner,
            reference=toy_reference(policy, self.params, self.ranks),
            scorer=self.scorer,
            tokenizer=tokenizer(),
            prompts=toy_prompts(),
            demonstrations=toy_demonstrations(),
            validate=lambda actor_critic: validation(self.validate(actor_critic)),
            on_iteration=self.on_iteration,
            save=lambda progress: self.save(self.learner, progress),
            on_alarm=self.on_alarm,
        )


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in learner.actor_critic.trained_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal to the last bit."""
    return one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())


def toy_experience(actor_critic: ActorCritic, params: Params) -> Experience:
    """One iteration's experience, with scores of the toy's scorer."""
    ppo = params.ppo
    numbers = np.arange(ppo.prompts_per_iteration)
    settings = {"exact": ppo.truncation == "exact", "seed": 0, "iteration": 0}
    rollout = sample(actor_critic.policy, tokenizer(), toy_prompts(), numbers, 2, ppo.sampling, **settings)
    reference = Reference(tiny_model(seed=5, spread=2.0), torch.float32)
    evaluated = evaluate_actions(actor_critic, reference, rollout.batch, ppo.sampling.temperature, 8, rollout.kept)
    scores = low_tokens(rollout.problems, rollout.texts, rollout.batch)
    return build_experience(rollout, evaluated, scores, ppo, kl_coef=0.05)
