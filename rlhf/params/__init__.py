"""The typed parameters: every key of `params.yaml` with its bounds and one line of help.

`conf/` holds the defaults and the groups (Hydra); this file holds the meaning. A key that is not here is refused, and
so is a value out of bounds, by its full name. `reads` keys exist for DVC: they name the path on this disk that a stage
depends on, or `conf/nothing` where its source is elsewhere.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf.params.operation import Generation, Limits, MirrorKind, Runtime, Sampler, Tracking
from rlhf.params.ppo import Critic, Distributed, Kl, Lora, Ppo, Reward, Sampling
from rlhf.params.registry import Gate, Registry
from rlhf.params.section import (
    MOST,
    NOTHING,
    REGISTERED,
    REWARD_MODEL_PATH,
    RUN,
    Count,
    Fit,
    Name,
    NonNegative,
    Section,
    Seed,
    Share,
    Size,
    Temperature,
)

__all__ = [
    "NOTHING",
    "REGISTERED",
    "REWARD_MODEL_PATH",
    "RUN",
    "SAMPLED",
    "Columns",
    "Critic",
    "Data",
    "Distributed",
    "Evaluation",
    "Finetune",
    "Gate",
    "Generator",
    "Hub",
    "Kl",
    "Limits",
    "Lora",
    "MirrorKind",
    "PairColumns",
    "Params",
    "Ppo",
    "Preferences",
    "Prompt",
    "Registry",
    "Reward",
    "RewardModel",
    "Runtime",
    "Sampler",
    "Sampling",
    "Section",
    "Sft",
    "Tiny",
    "Verifier",
    "is_directory",
    "is_file",
    "on_hub",
]


SAMPLED = "sampled"
"""The `preferences.source` that needs no data: the SFT policy's own answers, told apart by the verifier."""


def is_directory(source: str) -> bool:
    """Whether `sft.source` names a directory or file on this disk rather than `tiny:` or a URI."""
    return "://" not in source and source != "tiny:" and not source.startswith((REGISTERED, RUN))


def is_file(source: str) -> bool:
    """Whether `preferences.source` names a file on this disk."""
    return source != SAMPLED and "://" not in source


def on_hub(source: str) -> tuple[str, str] | None:
    """Repository and revision of `hf://org/name@revision`; None for any other source. Without a revision it is main."""
    match = re.fullmatch(r"hf://([^/@]+/[^/@]+)(?:@([^@]+))?", source)
    return (match[1], match[2] or "main") if match else None


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


class Columns(Section):
    """Which columns of files or hub hold what; other columns are ignored."""

    question: Annotated[list[Name], Field(min_length=1)]
    """Columns of the question's text, joined by a space."""
    answer: Name
    """Column of the answer: GSM8K's rationale with ####, MATH's with a box, or the number."""
    gold: str
    """Column of the final number; empty takes it from the answer."""
    rationale: str
    """Column of the worked solution; empty takes the answer."""


class Data(Section):
    source: Literal["generator", "hub", "files"]
    """Where the problems come from."""
    reads: Name
    """Directory of the train and test files for `files`; `conf/nothing` otherwise."""
    train: str
    """File in `reads`, or split of the hub's data set; empty finds train with any known ending."""
    test: str
    """File in `reads`, or split of the hub's data set; empty finds test with any known ending."""
    columns: Columns
    generator: Generator
    hub: Hub
    validation_share: Share
    """Share of train cut off for checkpoint selection, by a hash of the question."""
    gate_share: Share
    """Share of train cut off for the registry's gate, by a hash of the question."""
    max_overlap: Share
    """Share of a held-out split's questions that may share most of their 8-grams with train; more is refused."""
    max_drift: NonNegative
    """How far rows, lengths and answers may be from the data that the same params gave last; 0.5 is half again."""
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


class Finetune(Fit):
    """The supervised warm start on the demonstrations."""

    steps: Size
    """Optimiser steps; 0 passes the checkpoint on unchanged."""
    batch_size: Count
    """Rows a step."""
    micro_batch_size: Count
    """Rows a forward pass: memory only, never the result beyond rounding."""


class Sft(Section):
    source: Name
    """`tiny:`, a path, or a URI: `hf://org/name@revision`, `models:/NAME@ALIAS`, all in docs/checkpoints.md."""
    reads: Name
    """The same path where source is on this disk; `conf/nothing` otherwise."""
    chat_template: str
    """For a base model: `plain` (Question, Answer), or a chat template in Jinja; empty keeps the checkpoint's own."""
    eos_token: str
    """For a base model: the token of its vocabulary that ends an answer; empty keeps the checkpoint's own."""
    tiny: Tiny
    finetune: Finetune

    @model_validator(mode="after")
    def _consistent(self) -> Sft:
        wanted = self.source if is_directory(self.source) else NOTHING
        if self.reads != wanted:
            raise ValueError(f"reads must be {wanted} with source={self.source}")
        return self


class PairColumns(Section):
    """Which columns of a preference set hold what; other columns are ignored."""

    question: str
    """Column of the question; empty takes it from the transcripts or messages of the other two."""
    chosen: Name
    """Column of the better side: a transcript, a list of messages, or an answer beside a question column."""
    rejected: Name
    """Column of the worse side, in the same form."""


class Preferences(Section):
    source: Name
    """`sampled`, a file of judged pairs (.jsonl, .json, .csv or .parquet) or `hf://org/name@revision`."""
    reads: Name
    """The same path where source is a file; `conf/nothing` otherwise."""
    split: Name
    """Split of the hub's data set."""
    columns: PairColumns
    questions: Count
    """Questions at most: train questions to sample answers for, or those of the judged pairs."""
    samples: Annotated[int, Field(ge=2, le=MOST)]
    """Answers a question."""
    temperature: Temperature
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

    @model_validator(mode="after")
    def _consistent(self) -> Preferences:
        wanted = self.source if is_file(self.source) else NOTHING
        if self.reads != wanted:
            raise ValueError(f"reads must be {wanted} with source={self.source}")
        if "://" in self.source and on_hub(self.source) is None:
            raise ValueError(f"source={self.source}: name a file, or a data set of the hub as hf://org/name@revision")
        return self


class RewardModel(Fit):
    epochs: Count
    """Passes over the pairs."""
    batch_size: Count
    """Questions a step; each brings its pairs."""
    micro_batch_size: Count
    """Pairs a forward pass."""
    normalisation_samples: Annotated[int, Field(ge=2, le=MOST)]
    """SFT samples over which the score's mean and deviation are taken, at PPO's sampling settings."""


class Evaluation(Section):
    batch_size: Count
    """Rows decoded at once."""
    samples: Size
    """Problems shown side by side in the report."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)]
    """Level of every interval."""


class Params(Section):
    """All of `params.yaml`."""

    seed: Seed
    """Seed of initial weights, sampling and shuffling."""
    runtime: Runtime
    generation: Generation
    distributed: Distributed
    prompt: Prompt
    verifier: Verifier
    data: Data
    sft: Sft
    preferences: Preferences
    reward_model: RewardModel
    ppo: Ppo
    evaluation: Evaluation
    registry: Registry
    gate: Gate
    limits: Limits
    tracking: Tracking

    @model_validator(mode="after")
    def _shards_are_trained_whole(self) -> Params:
        if self.distributed.strategy == "fsdp" and self.generation.sampler == "native":
            raise ValueError(
                "distributed.strategy=fsdp samples from sharded models: take generation.sampler=transformers"
            )
        if self.distributed.strategy == "fsdp" and self.ppo.lora.rank:
            raise ValueError("distributed.strategy=fsdp trains all weights: take ddp, or ppo.lora.rank=0")
        return self

    @model_validator(mode="after")
    def _processes_share_minibatches(self) -> Params:
        rows = self.ppo.prompts_per_iteration * self.ppo.samples_per_prompt // self.ppo.minibatches
        if rows % self.distributed.processes:
            raise ValueError(
                f"distributed.processes={self.distributed.processes} must divide a minibatch's rows, "
                f"ppo.prompts_per_iteration x samples_per_prompt / minibatches = {rows}"
            )
        return self
