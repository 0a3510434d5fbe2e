"""The params of how the pipeline runs: where it computes, who samples, what it may take, where metrics go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf.params.section import NonNegative, Section, Size

Sampler = Literal["auto", "native", "transformers"]
MirrorKind = Literal["none", "tensorboard", "wandb"]


class Runtime(Section):
    device: Literal["auto", "cpu", "cuda"]
    """Where models run; `auto` takes a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"]
    """Precision of matrix products in training and sampling; master weights and log-probabilities stay float32."""
    threads: Annotated[int, Field(ge=1, le=1024)]
    """CPU threads; a fixed number, because sums change with it."""
    deterministic: bool
    """Refuse kernels whose result changes from run to run."""


class Generation(Section):
    sampler: Sampler
    """What runs the model sampled from: `native`, ours, for Llamas on CPUs; `transformers`; `auto`, ours if it can."""


class Tracking(Section):
    """Where metrics go beside MLflow. No stage depends on it."""

    mirror: MirrorKind
    """A copy of every stage's metrics, for TensorBoard or Weights & Biases; the package of that name is needed."""


class Limits(Section):
    """What flows may take: disk, and time for each stage, its wait for a device apart. No stage depends on them."""

    disk_gb: NonNegative
    """Gigabytes (1e9) for workspaces, DVC's cache, states, journals, artifacts: a run refuses over it; 0: no limit."""
    prepare_data_seconds: Size
    """How long prepare_data may take; 0 for no limit."""
    fetch_sft_seconds: Size
    """How long fetch_sft may take; 0 for no limit."""
    finetune_sft_seconds: Size
    """How long finetune_sft may take; 0 for no limit."""
    collect_preferences_seconds: Size
    """How long collect_preferences may take; 0 for no limit."""
    train_reward_seconds: Size
    """How long train_reward may take; 0 for no limit."""
    train_ppo_seconds: Size
    """How long train_ppo may take; 0 for no limit."""
    evaluate_seconds: Size
    """How long evaluate may take; 0 for no limit."""
    register_seconds: Size
    """How long register may take; 0 for no limit."""
