"""Which params a stage depends on, and how they are named where they stand side by side."""

from __future__ import annotations

from collections.abc import Mapping

SECTIONS = {
    "prepare_data": ("data",),
    "fetch_sft": (
        "ppo.sampling.max_new_tokens",
        "preferences.max_new_tokens",
        "prompt",
        "seed",
        "sft.chat_template",
        "sft.eos_token",
        "sft.source",
        "sft.tiny",
    ),
    "finetune_sft": ("prompt", "runtime", "seed", "sft.finetune"),
    "collect_preferences": ("generation", "ppo.sampling.stop", "preferences", "prompt", "runtime", "seed", "verifier"),
    "train_reward": (
        "evaluation.confidence",
        "generation",
        "ppo.sampling",
        "prompt",
        "reward_model",
        "runtime",
        "seed",
    ),
    "train_ppo": ("distributed", "evaluation.batch_size", "generation", "ppo", "prompt", "runtime", "seed", "verifier"),
    "evaluate": (
        "evaluation",
        "generation",
        "ppo.micro_batch_size",
        "ppo.sampling.max_new_tokens",
        "ppo.sampling.stop",
        "ppo.sampling.temperature",
        "prompt",
        "runtime",
        "verifier",
    ),
    "register": ("data.hub", "data.source", "gate", "ppo.sampling.max_new_tokens", "registry"),
}
"""The params that a stage depends on in `dvc.yaml`: its run shows them."""


def params_of(stage: str, params: Mapping[str, object]) -> dict[str, object]:
    """Those of the nested `params` that `stage` depends on, under dotted keys."""
    flat = flatten(params)
    sections = SECTIONS[stage]
    return {key: value for key, value in flat.items() if any(f"{key}.".startswith(f"{s}.") for s in sections)}


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as one, with dotted keys: {"a": {"b": 1}} gives {"a.b": 1}."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
