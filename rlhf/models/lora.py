"""Low-rank adapters (Hu et al., 2022, eq. 3): W x + (alpha / rank) B A x with W frozen, in every linear layer but the
output's.

The adapter is put into the model's own layers, so that the model stays the class that it is. All functions take any
model; peft is loaded for one with an adapter only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.params import Lora

NAME = "default"
"""peft's name of an adapter that is given none."""
FILE_PREFIX = "base_model.model."
"""What peft's files put before a weight's name."""


def add_adapter(model: PreTrainedModel, settings: Lora, seed: int) -> None:
    """Freezes the model's weights and gives it an adapter that changes nothing yet: A is drawn by `seed`, B is 0."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft multiplies with it
        lora_dropout=0.0,
        target_modules="all-linear",
        fan_in_fan_out=any(isinstance(part, Conv1D) for part in model.modules()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, NAME)
    for part in model.modules():
        if isinstance(part, LoraLayer):
            part.cast_input_dtype_enabled = False  # autocast does, and each layer would keep its own float32 copy


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether `add_adapter` was called on the model."""
    return hasattr(model, "peft_config")


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model is what it was before `add_adapter`."""
    if not has_adapter(model):
        yield
        return
    from peft.tuners.lora import LoraLayer

    layers = [part for part in model.modules() if isinstance(part, LoraLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model with W + (alpha / rank) B A for weights, in evaluation mode; the model itself without an adapter.

    A copy, because what is added to a weight cannot be taken off it again to the last bit.
    """
    if not has_adapter(model):
        return model
    from peft.tuners.lora import LoraLayer

    plain = deepcopy(model)
    for name, part in list(plain.named_modules()):
        if isinstance(part, LoraLayer):
            part.merge()
            plain.set_submodule(name, part.get_base_layer())
    del plain.peft_config
    return plain.eval()


def write_adapter(directory: Path, model: PreTrainedModel) -> None:
    """Writes the adapter to the new `directory` in peft's format, for `PeftModel.from_pretrained(base, directory)`.

    The same adapter gives the same bytes: peft's own writer keeps the base's path and the order of a set.
    """
    from peft import get_peft_model_state_dict

    weights = get_peft_model_state_dict(model, adapter_name=NAME)
    tensors = {FILE_PREFIX + name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    fields = model.peft_config[NAME].to_dict() | {"inference_mode": True, "base_model_name_or_path": None}
    text = json.dumps(fields, sort_keys=True, indent=2, default=sorted) + "\n"
    directory.mkdir()
    (directory / "adapter_model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")
