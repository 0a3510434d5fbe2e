"""The reward model: a sequence classifier with one output, read at the last real token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf.models.actor_critic import final_hidden
from rlhf.models.batches import TokenBatch


class Normalisation(NamedTuple):
    """Mean and deviation of the raw score over finished SFT samples; the normalised score is (raw - mean) / std."""

    mean: float
    std: float


def from_policy(policy: PreTrainedModel, pad_id: int) -> PreTrainedModel:
    """A reward model on the policy's trunk with a zero score head.

    `pad_id` must not be the end-of-sequence token: the classifier pools at the rightmost token that is not padding,
    and every finished response ends in end-of-sequence.
    """
    config = policy.config.__class__(**policy.config.to_dict())
    config.num_labels = 1
    config.pad_token_id = pad_id
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.base_model.load_state_dict(policy.base_model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    return model.to(policy.device).eval()


def raw_scores(model: PreTrainedModel, batch: TokenBatch, dtype: torch.dtype) -> Tensor:
    """Float32 (B,) scores at each row's last real token."""
    hidden = final_hidden(model, batch, dtype)
    last = hidden[torch.arange(len(batch), device=hidden.device), batch.lengths - 1]
    return model.score(last.float()).squeeze(-1)
