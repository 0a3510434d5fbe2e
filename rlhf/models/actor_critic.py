"""Policy and critic behind one forward pass, whether they share a trunk or not; and the frozen reference."""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models.batches import TokenBatch
from rlhf.models.token_logprobs import token_logprobs


class Actions(NamedTuple):
    """What the models say of a batch's actions; every tensor is float32 (B, T-1) and 0 off the response mask."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor


class PolicyLogprobs(NamedTuple):
    """Log-probability and entropy of a batch's actions, float32 (B, T-1), 0 off the response mask."""

    logprobs: Tensor
    entropy: Tensor


def final_hidden(model: PreTrainedModel, batch: TokenBatch, dtype: torch.dtype) -> Tensor:
    """(B, T, D) final hidden states, matrix products in `dtype`, in the model's own weights."""
    with torch.autocast(batch.tokens.device.type, dtype=dtype, enabled=dtype != torch.float32):
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        return model.base_model(
            input_ids=batch.tokens, attention_mask=batch.attention_mask, position_ids=positions, use_cache=False
        ).last_hidden_state


def action_logprobs(
    model: PreTrainedModel, hidden: Tensor, batch: TokenBatch, temperature: float, dtype: torch.dtype
) -> PolicyLogprobs:
    """Log-probabilities and entropies of the response actions, from final hidden states (B, T, D)."""
    mask = batch.mask
    with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype != torch.float32):
        chosen, entropies = token_logprobs(model, hidden[:, :-1][mask], batch.tokens[:, 1:][mask], temperature)
    return PolicyLogprobs(_scatter(chosen, mask), _scatter(entropies, mask))


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Float32 (B, T-1) with `values` (N,) on the mask and 0 elsewhere."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values.float())


class ValueHead(nn.Module):
    """A scalar for each hidden state; starts at zero, so that the first values are neutral."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Float32 (B, T-1) values, read at the hidden state of token t before action t; 0 off the mask."""
        return _scatter(self.linear(hidden[:, :-1][mask].float()).squeeze(-1), mask)


class ActorCritic(nn.Module):
    """A policy with its critic.

    With `critic=None` the value head reads the policy's trunk; otherwise it reads the trunk of a model of its own.
    Dropout stays off: the ratio of the first minibatch must be 1.
    """

    def __init__(self, policy: PreTrainedModel, critic: PreTrainedModel | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic
        self.value_head = ValueHead(policy.config.get_text_config().hidden_size).to(policy.device)
        self.dtype = dtype
        self.eval()

    def forward(self, batch: TokenBatch, temperature: float, train_policy: bool = True) -> Actions:
        """Log-probabilities, entropies and values of the batch's actions.

        With `train_policy=False` the policy gets no gradient, neither from its own loss nor through the value head.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and train_policy):
            hidden = final_hidden(self.policy, batch, self.dtype)
            actions = action_logprobs(self.policy, hidden, batch, temperature, self.dtype)
        if self.critic is not None:
            hidden = final_hidden(self.critic, batch, self.dtype)
        return Actions(*actions, values=self.value_head(hidden, batch.mask))

    def optimised(self, policy_lr: float, critic_lr: float) -> list[list[dict[str, object]]]:
        """Parameter groups, one list for each optimiser: one if the trunk is shared, else policy's and critic's."""
        policy = {"params": list(self.policy.parameters()), "lr": policy_lr, "role": "policy"}
        critic = {"params": list(self.value_head.parameters()), "lr": critic_lr, "role": "critic"}
        if self.critic is None:
            return [[policy, critic]]
        trunk = {"params": list(self.critic.base_model.parameters()), "lr": critic_lr, "role": "critic"}
        return [[policy], [trunk, critic]]


class Reference:
    """The frozen model that KL is measured against."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._model = model.eval().requires_grad_(False)
        self._dtype = dtype

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, temperature: float) -> Tensor:
        """Float32 (B, T-1) log-probabilities of the batch's actions, 0 off the mask."""
        hidden = final_hidden(self._model, batch, self._dtype)
        return action_logprobs(self._model, hidden, batch, temperature, self._dtype).logprobs


def sampling_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model to sample from: itself in float32, else a copy of its weights in `dtype`."""
    return model if dtype == torch.float32 else deepcopy(model).to(dtype).eval()
