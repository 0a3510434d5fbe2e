"""Policy and critic behind one forward pass, whether they share a trunk or not; and the frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.models.batches import TokenBatch
from rlhf.models.llama import packed_hidden, why_not_family
from rlhf.models.lora import adapter_off, has_adapter, merged
from rlhf.models.sharding import in_lock_step, is_sharded
from rlhf.models.token_logprobs import token_logprobs

T = TypeVar("T")


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
    """(B, T, D) final hidden states, matrix products in `dtype`; what stands on padding means nothing."""
    with torch.autocast(batch.tokens.device.type, dtype=dtype, enabled=dtype != torch.float32):
        if why_not_family(model) is None:
            real = batch.attention_mask.bool()
            packed = packed_hidden(model, batch, dtype)
            return packed.new_zeros(*real.shape, packed.shape[1]).masked_scatter(real[..., None], packed)
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        return model.base_model(
            input_ids=batch.tokens, attention_mask=batch.attention_mask, position_ids=positions, use_cache=False
        ).last_hidden_state


def action_logprobs(
    model: PreTrainedModel,
    hidden: Tensor,
    batch: TokenBatch,
    temperature: float,
    dtype: torch.dtype,
    kept: Tensor | None = None,
) -> PolicyLogprobs:
    """Log-probabilities and entropies of the response actions, from final hidden states (B, T, D).

    With `kept` (B, T-1, K) the distribution is renormalised over these token ids (-1 is none).
    """
    mask = batch.mask
    among = None if kept is None else kept[mask]
    with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype != torch.float32):
        targets = batch.tokens[:, 1:][mask]
        chosen, entropies = token_logprobs(model, hidden[:, :-1][mask], targets, temperature, kept=among)
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

    @torch.no_grad()
    def start_from(self, weight: Tensor, mean: float, std: float) -> None:
        """Begins with (weight . hidden - mean) / std as the value; `weight` (1, D)."""
        self.linear.weight.copy_(weight / std)
        self.linear.bias.fill_(-mean / std)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Float32 (B, T-1) values, read at the hidden state of token t before action t; 0 off the mask."""
        return _scatter(self.linear(hidden[:, :-1][mask].float()).squeeze(-1), mask)


class ActorCritic(nn.Module):
    """A policy with its critic.

    With `critic=None` the value head reads the policy's trunk; otherwise `critic` is the trunk that it reads.
    Dropout stays off: the ratio of the first minibatch must be 1.
    """

    def __init__(self, policy: PreTrainedModel, critic: PreTrainedModel | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic
        self.value_head = ValueHead(policy.config.get_text_config().hidden_size).to(policy.device)
        self.dtype = dtype
        self.eval()

    def forward(
        self, batch: TokenBatch, temperature: float, train_policy: bool = True, kept: Tensor | None = None
    ) -> Actions:
        """Log-probabilities, entropies and values of the batch's actions.

        With `train_policy=False` the policy gets no gradient, neither from its own loss nor through the value head.
        `kept` (B, T-1, K), padded with -1, are the tokens that each action was drawn from, where not from all.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and train_policy):
            hidden = final_hidden(self.policy, batch, self.dtype)
            actions = action_logprobs(self.policy, hidden, batch, temperature, self.dtype, kept)
        if self.critic is not None:
            hidden = final_hidden(self.critic, batch, self.dtype)
        return Actions(*actions, values=self.value_head(hidden, batch.mask))

    def state_values(self, batch: TokenBatch) -> Tensor:
        """Values of the batch's actions, without log-probabilities."""
        trunk = self.policy if self.critic is None else self.critic
        return self.value_head(final_hidden(trunk, batch, self.dtype), batch.mask)

    def policy_logprobs(self, batch: TokenBatch, temperature: float) -> PolicyLogprobs:
        """Log-probabilities and entropies of the batch's actions, without values."""
        hidden = final_hidden(self.policy, batch, self.dtype)
        return action_logprobs(self.policy, hidden, batch, temperature, self.dtype)

    @torch.no_grad()
    def sampling(self, work: Callable[[PreTrainedModel], T]) -> T:
        """What `work` makes of the policy that it is given to sample from; how much it samples may differ by rank."""
        if not is_sharded(self):
            return work(sampling_copy(self.policy, self.dtype))
        with torch.autocast(self.policy.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return in_lock_step(self.policy, lambda: work(self.policy))

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What training changes, by name."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def optimised(self, policy_lr: float, critic_lr: float) -> list[list[dict[str, object]]]:
        """Parameter groups, one list for each optimiser: one if the trunk is shared, else policy's and critic's."""
        policy = {"params": _trained(self.policy), "lr": policy_lr, "role": "policy"}
        critic = {"params": _trained(self.value_head), "lr": critic_lr, "role": "critic"}
        if self.critic is None:
            return [[policy, critic]]
        trunk = {"params": _trained(self.critic), "lr": critic_lr, "role": "critic"}
        return [[policy], [trunk, critic]]


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def checkpoint_layers(model: nn.Module) -> None:
    """Computes the activations of every decoder layer again in the backward pass (Chen et al., 2016).

    The layers do so in training mode only; what is inside them stays in evaluation mode, without dropout.
    """
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.supports_gradient_checkpointing:
            part.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for part in model.modules():
        if isinstance(part, GradientCheckpointingLayer):
            part.training = True


def rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A model that is not trained any more, its layers' matrices kept in `dtype`: as autocast rounds them at each use,
    so to the same values. All else keeps its precision."""
    for part in model.base_model.modules():
        if type(part) is nn.Linear:
            part.weight = nn.Parameter(part.weight.to(dtype), requires_grad=False)
    return model


class Reference(nn.Module):
    """The frozen model that KL is measured against; of a policy with an adapter, what it is without."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        super().__init__()
        self._model = model if has_adapter(model) else model.eval().requires_grad_(False)
        self._dtype = dtype

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, temperature: float, kept: Tensor | None = None) -> Tensor:
        """Float32 (B, T-1) log-probabilities of the batch's actions, among `kept` if given; 0 off the mask."""
        with adapter_off(self._model):
            hidden = final_hidden(self._model, batch, self._dtype)
            return action_logprobs(self._model, hidden, batch, temperature, self._dtype, kept).logprobs


def sampling_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model to sample from: itself in float32, else a copy of its weights in `dtype`; an adapter is merged."""
    if dtype == torch.float32:
        return merged(model)
    return (merged(model) if has_adapter(model) else deepcopy(model)).to(dtype).eval()
