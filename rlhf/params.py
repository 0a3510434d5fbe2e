"""The typed parameters: every key of `params.yaml` with its bounds and one line of help.

`conf/` holds the defaults and the groups (Hydra); this file holds the meaning. A key that is not here is refused, and
so is a value out of bounds, by its full name. `reads` keys exist for DVC: they name the path on this disk that a stage
depends on, or `conf/nothing` where its source is elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

NOTHING = "conf/nothing"
REWARD_MODEL_PATH = "models/reward"


class Section(BaseModel):
    """A block of params: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"Input should not be {str(value).lower()}")
        return value


MOST = 1_000_000  # far beyond any run, and small enough that a slip of the finger does not fill the memory
Count = Annotated[int, Field(ge=1, le=MOST)]
Size = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]


def is_directory(source: str) -> bool:
    """Whether `sft.source` names a directory on this disk rather than `tiny:` or a URI."""
    return "://" not in source and source != "tiny:"


class Runtime(Section):
    device: Literal["auto", "cpu", "cuda"]
    """Where models run; `auto` takes a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"]
    """Precision of matrix products in training and sampling; master weights and log-probabilities stay float32."""
    threads: Annotated[int, Field(ge=1, le=1024)]
    """CPU threads; a fixed number, because sums change with it."""
    deterministic: bool
    """Refuse kernels whose result changes from run to run."""


class Prompt(Section):
    system: str
    """System message; empty for none."""
    template: str
    """User message; `{question}` is replaced."""
    max_tokens: Count
    """Longest prompt in tokens; training drops longer ones and counts them, evaluation counts them as wrong."""

    @model_validator(mode="after")
    def _has_question(self) -> Prompt:
        if "{question}" not in self.template:
            raise ValueError("template must contain {question}")
        return self


class Verifier(Section):
    method: Literal["strict", "flexible"]
    """`strict` reads the number after the first `####`; `flexible` falls back to the last number of the text."""


class Generator(Section):
    """The built-in word problems."""

    seed: Seed
    """Seed of the problems; apart from the global seed, so that runs with several seeds share their data."""
    train: Count
    """Problems before validation and gate are cut from them."""
    test: Count
    """Held-out problems."""
    careless_low: Share
    """Share of careless demonstrations in the first of every four templates."""
    careless_high: Share
    """Share of careless demonstrations in the other three."""


class Hub(Section):
    """The data set on the Hugging Face hub."""

    repo: Name
    """Data set name."""
    config: Name
    """Configuration of the data set."""
    revision: Name
    """Commit, tag or branch of the data set."""


class Data(Section):
    source: Literal["generator", "hub", "files"]
    """Where the problems come from."""
    reads: Name
    """Directory with train.jsonl and test.jsonl for `files`; `conf/nothing` otherwise."""
    generator: Generator
    hub: Hub
    validation_share: Share
    """Share of train cut off for checkpoint selection, by a hash of the question."""
    gate_share: Share
    """Share of train cut off for the registry's gate, by a hash of the question."""
    max_train: Count | None
    """Keep at most this many train rows (lowest question hashes first); null keeps all."""
    max_validation: Count | None
    """Keep at most this many validation rows; null keeps all."""
    max_gate: Count | None
    """Keep at most this many gate rows; null keeps all."""
    max_test: Count | None
    """Keep at most this many test rows; null keeps all."""

    @model_validator(mode="after")
    def _consistent(self) -> Data:
        if (self.source == "files") == (self.reads == NOTHING):
            raise ValueError(
                "reads must name the directory of train.jsonl and test.jsonl with source=files, and be "
                f"{NOTHING} with any other source (data=files or data=generator sets both)"
            )
        if self.validation_share + self.gate_share >= 1:
            raise ValueError("validation_share + gate_share must stay below 1, or no train row is left")
        return self


class Tiny(Section):
    """The fresh Llama that `sft.source=tiny:` makes."""

    hidden_size: Count
    """Width of the residual stream."""
    layers: Count
    """Decoder layers."""
    heads: Count
    """Attention heads."""
    intermediate_size: Count
    """Width of the feed-forward layer."""
    context: Count
    """Longest sequence in tokens."""
    vocabulary: Annotated[int, Field(ge=270, le=MOST)]
    """Upper limit of the tokenizer's vocabulary."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Tiny:
        if self.hidden_size % (2 * self.heads):
            raise ValueError("hidden_size must be a multiple of 2 x heads")
        return self


class Finetune(Section):
    """The supervised warm start on the demonstrations."""

    steps: Size
    """Optimiser steps; 0 passes the checkpoint on unchanged."""
    batch_size: Count
    """Rows a step."""
    micro_batch_size: Count
    """Rows a forward pass: memory only, never the result beyond rounding."""
    lr: Positive
    """Peak learning rate; falls linearly to a tenth."""
    warmup_steps: Size
    """Steps of linear warm-up."""
    weight_decay: NonNegative
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive
    """Gradient norm above which gradients are scaled down."""


class Sft(Section):
    source: Name
    """Checkpoint to start from: `tiny:`, a directory, `hf://org/name@revision`, or `wheel://package==version/path`."""
    reads: Name
    """The same path where source is a directory; `conf/nothing` otherwise."""
    tiny: Tiny
    finetune: Finetune

    @model_validator(mode="after")
    def _consistent(self) -> Sft:
        wanted = self.source if is_directory(self.source) else NOTHING
        if self.reads != wanted:
            raise ValueError(f"reads must be {wanted} with source={self.source}")
        return self


class Preferences(Section):
    questions: Count
    """Train questions to sample answers for."""
    samples: Annotated[int, Field(ge=2, le=MOST)]
    """Answers a question."""
    temperature: Positive
    """Sampling temperature."""
    max_new_tokens: Count
    """Longest answer in tokens."""
    max_pairs: Annotated[int, Field(ge=1, le=4)]
    """Pairs a question at most; all of them train in one batch."""
    validation_share: Share
    """Share of questions whose pairs are held out."""
    gold_stand_in: bool
    """Where no sample is right, the gold rationale is the chosen answer."""
    batch_size: Count
    """Rows sampled at once."""


class RewardModel(Section):
    epochs: Count
    """Passes over the pairs."""
    batch_size: Count
    """Questions a step; each brings its pairs."""
    micro_batch_size: Count
    """Pairs a forward pass."""
    lr: Positive
    """Peak learning rate; falls linearly to a tenth."""
    warmup_steps: Size
    """Steps of linear warm-up."""
    weight_decay: NonNegative
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive
    """Gradient norm above which gradients are scaled down."""
    normalisation_samples: Annotated[int, Field(ge=2, le=MOST)]
    """SFT samples over which the score's mean and deviation are taken, at PPO's sampling settings."""


class Sampling(Section):
    """How PPO's rollouts are drawn."""

    temperature: Positive
    """Sampling temperature; log-probabilities are taken at it too."""
    max_new_tokens: Count
    """Longest response in tokens, in rollouts and in evaluation."""
    batch_size: Count
    """Rows decoded at once."""


class Reward(Section):
    source: Literal["verifier", "reward_model", "mixture"]
    """What scores a response."""
    reads: Literal["conf/nothing", "models/reward"]
    """models/reward where the source uses it; conf/nothing otherwise."""
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

    @model_validator(mode="after")
    def _consistent(self) -> Reward:
        wanted = NOTHING if self.source == "verifier" else REWARD_MODEL_PATH
        if self.reads != wanted:
            raise ValueError(
                f"reads must be {wanted} with source={self.source} (the group choice reward={self.source} sets both)"
            )
        if self.source == "mixture" and self.verifier_weight + self.reward_model_weight == 0:
            raise ValueError("a mixture needs verifier_weight or reward_model_weight above 0")
        return self


class Critic(Section):
    kind: Literal["shared", "separate"]
    """`shared` is a head on the policy's trunk; `separate` is a model of its own that starts from the SFT policy."""
    lr: Positive
    """Learning rate of the value head (shared) or of the whole critic (separate)."""
    warmup_iterations: Size
    """First iterations that train the critic alone; a shared head is then cut from the trunk."""


class Kl(Section):
    kind: Literal["fixed", "adaptive"]
    """Whether the coefficient stays or follows the target."""
    coef: NonNegative
    """KL coefficient beta, at the start if adaptive."""
    target: Positive
    """Adaptive: KL to the reference in nats a sequence."""
    horizon: Positive
    """Adaptive: sequences over which the coefficient moves by its full error."""


class Ppo(Section):
    iterations: Count
    """Rounds of rollout and update."""
    prompts_per_iteration: Count
    """Questions an iteration."""
    samples_per_prompt: Count
    """Responses a question."""
    epochs: Count
    """Passes over an iteration's responses."""
    minibatches: Count
    """Optimiser steps a pass."""
    micro_batch_size: Count
    """Responses a forward pass: memory only, never the result beyond rounding."""
    lr: Positive
    """Policy learning rate."""
    warmup_iterations: Size
    """Iterations of linear learning-rate warm-up, after the critic's."""
    weight_decay: NonNegative
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive
    """Gradient norm above which gradients are scaled down."""
    gamma: Share
    """Discount a token."""
    lam: Share
    """GAE's lambda."""
    clip: Positive
    """Half-width of the ratio's trust interval."""
    value_clip: Positive
    """Half-width of the value's trust interval."""
    value_coef: NonNegative
    """Weight of the value loss beside the policy loss."""
    entropy_coef: NonNegative
    """Weight of the entropy bonus."""
    whiten_advantages: bool
    """Whiten advantages over all response tokens of an iteration."""
    eval_every: Count
    """Iterations between validations; iteration 0 and the last are always validated."""
    sampling: Sampling
    reward: Reward
    critic: Critic
    kl: Kl

    @model_validator(mode="after")
    def _sizes(self) -> Ppo:
        rows = self.prompts_per_iteration * self.samples_per_prompt
        if rows % self.minibatches:
            raise ValueError(f"minibatches must divide prompts_per_iteration x samples_per_prompt = {rows}")
        return self


class Evaluation(Section):
    batch_size: Count
    """Rows decoded at once."""
    samples: Size
    """Problems shown side by side in the report."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)]
    """Level of every interval."""


class Registry(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Registered model's name."""


class Params(Section):
    """All of `params.yaml`."""

    seed: Seed
    """Seed of initial weights, sampling and shuffling."""
    runtime: Runtime
    prompt: Prompt
    verifier: Verifier
    data: Data
    sft: Sft
    preferences: Preferences
    reward_model: RewardModel
    ppo: Ppo
    evaluation: Evaluation
    registry: Registry
