"""What the measured programs share: params, prompts, models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from bench.performance.measured.meter import Settings
from rlhf import config, runtime
from rlhf.data.gsm8k import Problem
from rlhf.models.checkpoints import load_policy
from rlhf.params import Params

# fmt: off
SHAPES: dict[str, Any] = {
    "tiny": LlamaConfig(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, vocab_size=480,
        tie_word_embeddings=True,
    ),
    "500M": Qwen2Config(
        hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864,
        vocab_size=151936, tie_word_embeddings=True,
    ),
}
# fmt: on
"""Shapes that get random weights: scale=tiny's, and Qwen2.5-0.5B's."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def params_of(settings: Settings) -> Params:
    """The params that `settings` compose, which this process then computes by."""
    words = [*settings["words"], f"runtime.threads={settings['threads']}", *settings.get("overrides", ())]
    params = config.validate(config.compose(words))
    runtime.configure(params.runtime, params.seed)
    return params


def problems(settings: Settings, count: int) -> list[Problem]:
    """The first `count` problems of the measurement; more than there are repeat them."""
    rows = [Problem(**row) for row in json.loads(Path(settings["data"], "problems.json").read_text())]
    return [rows[number % len(rows)] for number in range(count)]


def prompts(settings: Settings, count: int) -> list[list[int]]:
    """Their prompts' tokens."""
    rows = json.loads(Path(settings["data"], "prompts.json").read_text())
    return [rows[number % len(rows)] for number in range(count)]


def model_of(settings: Settings) -> PreTrainedModel:
    """The checkpoint of the measurement, or a random model of the shape that `shape` names; float32."""
    shape = SHAPES.get(settings.get("shape", ""))
    if shape is None:
        return load_policy(Path(settings["data"], "model"))
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    return model.eval()


def within(tokens: Sequence[Sequence[int]], model: PreTrainedModel) -> list[list[int]]:
    """The same rows in the model's own vocabulary."""
    size = model.config.get_text_config().vocab_size
    return [[token % size for token in row] for row in tokens]
