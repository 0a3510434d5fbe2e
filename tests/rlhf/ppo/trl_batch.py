"""What `tests/fixtures/trl/make.py` recorded of TRL's PPOTrainer, in its layout and in ours."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rlhf.models.actor_critic import ActorCritic
from rlhf.models.batches import TokenBatch, pad

FIXTURE = Path(__file__).parents[2] / "fixtures" / "trl" / "batch.safetensors"
Tensors = dict[str, Tensor]


@cache
def recorded() -> tuple[Tensors, dict[str, dict[str, float]]]:
    """All tensors, and the shape of the models and TRL's settings."""
    with safe_open(FIXTURE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return tensors, json.loads(file.metadata()["made_with"])


def group(prefix: str) -> Tensors:
    """The tensors whose names start so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in recorded()[0].items() if name.startswith(prefix)}


class Frame(NamedTuple):
    """Rows in our layout, and TRL's places (B, response length) of their actions, in the same order."""

    batch: TokenBatch
    places: Tensor

    def ours(self, theirs: Tensor) -> Tensor:
        """(B, T-1) float64 with TRL's (B, response length) at our actions."""
        empty = torch.zeros(self.batch.mask.shape, dtype=torch.float64)
        return empty.masked_scatter(self.batch.mask, theirs[self.places].double())


def frame(run: Tensors, *, behind_the_end: bool, rows: Tensor | None = None) -> Frame:
    """All rows of a run, or some; with `behind_the_end` TRL's further state counts as an action."""
    chosen = torch.arange(len(run["queries"])) if rows is None else rows
    queries, responses = run["queries"][chosen], run["responses"][chosen]
    lengths = (~run["padding_mask"][chosen]).sum(dim=1)
    if behind_the_end:
        lengths = (lengths + 1).clamp_max(responses.shape[1])
    return Frame(
        batch=pad(
            [query[query != 0].tolist() for query in queries],
            [response[:length].tolist() for response, length in zip(responses, lengths, strict=True)],
            0,
        ),
        places=torch.arange(responses.shape[1]) < lengths[:, None],
    )


def micro_batch(number: int) -> tuple[Tensors, Tensors, Tensor, Tensor]:
    """What TRL's micro-batch computed, what it read, and its masks of response actions and of values."""
    new, run = group(f"plain/micro/{number}/"), group("plain/")
    names = ("logprobs", "values", "returns", "advantages", "padding_mask", "queries", "responses")
    old = {name: run[name][new["rows"]] for name in names}
    return new, old, ~old["padding_mask"], frame(run, behind_the_end=True, rows=new["rows"]).places


def actor_critic(step: int) -> ActorCritic:
    """Our actor-critic with the weights that TRL had before a step."""
    config = LlamaConfig(**recorded()[1]["model"], num_labels=1)
    policy, critic = LlamaForCausalLM(config), LlamaForSequenceClassification(config)
    missing = policy.load_state_dict(group(f"plain/step/{step}/weight/policy/"), strict=False).missing_keys
    assert missing == ["lm_head.weight"]  # tied
    critic.load_state_dict(group(f"plain/step/{step}/weight/critic/"))
    ours = ActorCritic(policy, critic, torch.float32)
    ours.value_head.linear.weight.data.copy_(critic.score.weight)
    return ours
