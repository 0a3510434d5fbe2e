"""Tiny policies, as `train_ppo` writes them, for tests of the registry and of what asks a policy."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf.config import compose, validate
from rlhf.models.checkpoints import Manifest, save_checkpoint
from rlhf.models.tiny import make_tiny

PARAMS = validate(compose(["scale=smoke", "runtime.device=cpu"]))


def save_policy(directory: Path, seed: int = 0) -> Path:
    """A policy with random weights, wide enough that its answers differ; another seed makes another policy."""
    model, tokenizer = make_tiny(PARAMS.sft.tiny, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.3, generator=generator)
    manifest = Manifest(
        kind="policy",
        source="tiny:",
        parents={"sft": "5f7"},
        params={"seed": seed, "verifier": PARAMS.verifier.model_dump(), "ppo": PARAMS.ppo.model_dump()},
        seed=seed,
        prompt=PARAMS.prompt.model_dump(),
        stop_token=str(tokenizer.eos_token),
    )
    directory.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(directory, model, tokenizer, manifest)
    return directory
