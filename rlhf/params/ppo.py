"""The params of PPO, each section beside the rules that its keys must keep among themselves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rlhf.params.section import (
    LARGEST,
    NOTHING,
    REWARD_MODEL_PATH,
    Count,
    Finite,
    Name,
    NonNegative,
    Positive,
    Section,
    Share,
    Size,
    Temperature,
)

LARGEST_ERROR = 0.2
"""Share of the target that an adaptive KL coefficient reacts to at most (Ziegler et al., 2019)."""


class Sampling(Section):
    """How responses are drawn in rollouts; evaluation shares the length limit and the stop strings."""

    temperature: Temperature
    """Sampling temperature; log-probabilities are taken at it too."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Draw from the fewest tokens that hold this share of the probability; 1 draws from all."""
    top_k: Size
    """Draw from this many most probable tokens; 0 draws from all."""
    max_new_tokens: Count
    """Longest response in tokens, in rollouts and in evaluation."""
    stop: list[Name]
    """Texts that end a response, as its end-of-sequence token does; they stay in it."""
    batch_size: Count
    """Rows decoded at once."""


class Reward(Section):
    source: Literal["verifier", "reward_model", "mixture"]
    """What scores a response."""
    reads: Literal["conf/nothing", "models/reward"]
    """models/reward where the score, the critic's start or the selection use it; conf/nothing otherwise."""
    verifier_weight: NonNegative
    """Weight of the verifier in a mixture."""
    reward_model_weight: NonNegative
    """Weight of the normalised reward-model score in a mixture."""
    format_bonus: Annotated[float, Field(ge=0, le=0.2)]
    """Added to the verifier's 0 or 1 for exactly one well-formed final answer."""
    cut_off_score: Finite
    """Replaces the task score of a response that the length limit cut off."""
    clip: Positive
    """The task score is clipped to [-clip, clip]."""
    whiten: bool
    """Divide the task scores by their deviation over the iteration, their mean kept."""

    @field_validator("source", mode="before")
    @classmethod
    def _long_names(cls, value: object) -> object:
        if value == "rm":
            raise ValueError("write reward_model for rm (the group choice reward=reward_model sets all that it needs)")
        return value

    @model_validator(mode="after")
    def _a_mixture_weighs(self) -> Reward:
        if self.source == "mixture" and self.verifier_weight + self.reward_model_weight == 0:
            raise ValueError("a mixture needs verifier_weight or reward_model_weight above 0")
        return self


class Critic(Section):
    kind: Literal["shared", "separate"]
    """`shared` is a head on the policy's trunk; `separate` is a model of its own."""
    start: Literal["sft", "reward_model"]
    """What a separate critic's trunk starts from."""
    lr: Positive
    """Learning rate of the value head (shared) or of the whole critic (separate)."""
    warmup_iterations: Size
    """First iterations that train the critic alone; a shared head is then cut from the trunk."""

    @model_validator(mode="after")
    def _a_shared_trunk_is_the_policys(self) -> Critic:
        if self.kind == "shared" and self.start != "sft":
            raise ValueError("start=reward_model needs a trunk of its own: take kind=separate")
        return self


class Kl(Section):
    """The penalty for leaving the reference."""

    place: Literal["reward", "loss"]
    """`reward` subtracts it from each token's reward; `loss` adds it to the policy's loss."""
    estimator: Literal["k1", "k2", "k3", "ratio_k1", "ratio_k3"]
    """k1 in the reward; ratio_k1, ratio_k3, k2 or k3 (GRPO's, the forward KL's gradient) in the loss."""
    kind: Literal["fixed", "adaptive"]
    """Whether the coefficient stays or follows the target."""
    coef: NonNegative
    """KL coefficient beta, at the start if adaptive."""
    target: Positive
    """Adaptive: KL to the reference in nats a sequence."""
    horizon: Positive
    """Adaptive: sequences over which the coefficient moves by its full error."""
    limit: Positive | None
    """KL in nats a sequence at which training stops; null never stops it."""

    @model_validator(mode="after")
    def _the_form_fits_the_place(self) -> Kl:
        if self.place == "reward" and self.estimator != "k1":
            raise ValueError(
                f"estimator={self.estimator} has no place in the reward: take k1, or place=loss "
                "(k2 and k3 are never negative and push down tokens that already lost probability)"
            )
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError("estimator=k1 in the loss has a gradient of mean zero: take ratio_k1, ratio_k3, k2 or k3")
        if self.kind == "adaptive" and self.coef == 0:
            raise ValueError("kind=adaptive multiplies the coefficient: start it above 0 (coef)")
        return self


class Lora(Section):
    """Low-rank adapters on the policy (Hu et al., 2022), in every linear layer but the output's."""

    rank: Size
    """Rank of the adapters, which want about ten times the learning rate (ppo.lr); 0 trains all weights."""
    alpha: Positive
    """The adapters' product is scaled by alpha / rank."""


class Ppo(Section):
    iterations: Count
    """Rounds of rollout and update."""
    prompts_per_iteration: Count
    """Questions an iteration."""
    samples_per_prompt: Count
    """Responses a question."""
    curriculum_iterations: Size
    """First iterations in which the questions grow from those of the fewest steps to all; 0 draws from all at once."""
    epochs: Count
    """Passes over an iteration's responses."""
    minibatches: Count
    """Optimiser steps a pass."""
    micro_batch_size: Count
    """Responses a forward pass: memory only, never the result beyond rounding."""
    gradient_checkpointing: bool
    """Compute each layer's activations again in the backward pass: less memory, more time."""
    lr: Positive
    """Policy learning rate."""
    warmup_iterations: Size
    """Iterations of linear learning-rate warm-up, after the critic's."""
    lr_schedule: Literal["constant", "linear", "cosine"]
    """The policy's learning rate after the warm-up; both falls end at a tenth."""
    weight_decay: NonNegative
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive
    """Gradient norm above which gradients are scaled down."""
    gamma: Share
    """Discount a token."""
    lam: Share
    """GAE's lambda."""
    clip_low: Annotated[float, Field(gt=0, lt=1)]
    """The ratio's trust interval begins at 1 - clip_low."""
    clip_high: Positive
    """The ratio's trust interval ends at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1, le=LARGEST)] | None
    """Bound on the ratio's effect where the advantage is negative; null sets none."""
    target_kl: Positive | None
    """Approximate KL of a minibatch to the rollout's policy that ends an iteration's update; null never does."""
    value_clip: Positive
    """Half-width of the value's trust interval."""
    value_coef: NonNegative
    """Weight of the value loss beside the policy loss."""
    entropy_coef: NonNegative
    """Weight of the entropy bonus."""
    ptx_coef: NonNegative
    """Weight of the supervised loss on demonstrations mixed into every minibatch (PPO-ptx)."""
    whiten_advantages: bool
    """Whiten advantages over all response tokens of an iteration."""
    truncation: Literal["full", "exact"]
    """With top_p or top_k, train on the `full` distribution or `exact`ly on the kept tokens, renormalised."""
    old_logprobs: Literal["trainer", "sampler"]
    """Whose log-probabilities of the sampled tokens the update starts from; the `trainer` computes them again."""
    importance: Literal["auto", "on", "off"]
    """Weigh tokens by trainer's over sampler's probability; `auto` does so where their precisions differ."""
    importance_cap: Annotated[float, Field(ge=1, le=LARGEST)]
    """Largest such weight."""
    eval_every: Count
    """Iterations between validations; iteration 0 and the last are always validated."""
    selection: Literal["verifier", "reward_model"]
    """What decides on validation which iteration's policy is kept: accuracy, or the reward model's mean score."""
    panel: Size
    """Validation problems whose answers are kept at every validation, for the report."""
    sampling: Sampling
    reward: Reward
    critic: Critic
    kl: Kl
    lora: Lora

    @model_validator(mode="after")
    def _sizes(self) -> Ppo:
        rows = self.prompts_per_iteration * self.samples_per_prompt
        if rows % self.minibatches:
            raise ValueError(f"minibatches must divide prompts_per_iteration x samples_per_prompt = {rows}")
        return self

    @model_validator(mode="after")
    def _trains_the_policy(self) -> Ppo:
        if self.critic.warmup_iterations >= self.iterations:
            raise ValueError(
                f"critic.warmup_iterations={self.critic.warmup_iterations} leaves no iteration that trains the policy: "
                f"take fewer than iterations={self.iterations}"
            )
        return self

    @model_validator(mode="after")
    def _the_coefficient_stays_above_0(self) -> Ppo:
        rows = self.prompts_per_iteration * self.samples_per_prompt
        if self.kl.kind == "adaptive" and self.kl.horizon <= LARGEST_ERROR * rows:
            raise ValueError(
                f"kl.horizon={self.kl.horizon:g} would let one iteration turn the coefficient negative: take more than "
                f"{LARGEST_ERROR:g} x prompts_per_iteration x samples_per_prompt = {LARGEST_ERROR * rows:g}"
            )
        return self

    @model_validator(mode="after")
    def _reads_the_reward_model_where_it_is_used(self) -> Ppo:
        users = {
            f"reward.source={self.reward.source}": self.reward.source != "verifier",
            "critic.start=reward_model": self.critic.start == "reward_model",
            "selection=reward_model": self.selection == "reward_model",
        }
        user = next((name for name, uses in users.items() if uses), None)
        wanted = REWARD_MODEL_PATH if user else NOTHING
        if self.reward.reads != wanted:
            raise ValueError(
                f"reward.reads must be {wanted} with {user or 'reward.source=verifier'} "
                "(the group choice reward=... sets reward.source and reward.reads)"
            )
        return self


class Distributed(Section):
    """Several processes for PPO, one a device."""

    processes: Annotated[int, Field(ge=1, le=1024)]
    """Processes that share rollouts, update and validation."""
    strategy: Literal["ddp", "fsdp"]
    """`ddp` keeps the whole models in each process, `fsdp` a part of policy, critic and reference."""
