"""The family's trunk against transformers' own forward and backward pass over the same rows, padded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.models.actor_critic import ActorCritic, Reference, checkpoint_layers
from rlhf.models.batches import TokenBatch, pad
from rlhf.models.llama import packed_hidden, why_not_family
from rlhf.models.lora import add_adapter
from rlhf.params import Lora
from tests.family_models import FAMILY, family_model
from tests.tiny_models import EOS, random_tokens, tiny_model

Hidden = Callable[[PreTrainedModel, TokenBatch], Tensor]


def batch() -> TokenBatch:
    """Four rows of lengths 8, 14, 2 and 12."""
    return pad(random_tokens([3, 9, 1, 6]), random_tokens([5, 5, 1, 6], seed=1), EOS)


def packed(model: PreTrainedModel, rows: TokenBatch) -> Tensor:
    return packed_hidden(model, rows, torch.float32)


def padded(model: PreTrainedModel, rows: TokenBatch) -> Tensor:
    """Transformers' hidden states of the real tokens."""
    mask = rows.attention_mask
    hidden = model.base_model(input_ids=rows.tokens, attention_mask=mask, use_cache=False).last_hidden_state
    return hidden[mask.bool()]


def gradients(hidden: Hidden, model: PreTrainedModel) -> dict[str, Tensor]:
    """Of a sum of the hidden states in which each number counts differently."""
    out = hidden(model, batch())
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    found = torch.autograd.grad((out * weights).sum(), list(trained.values()), allow_unused=True)
    return {name: each for name, each in zip(trained, found, strict=True) if each is not None}


def assert_same_gradients(model: PreTrainedModel) -> None:
    ours, theirs = gradients(packed, model), gradients(padded, model)
    assert ours.keys() == theirs.keys() and len(theirs) >= 8
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4, msg=name)


@pytest.mark.parametrize("name", FAMILY)
def test_hidden_states_and_gradients_are_those_of_transformers(name: str) -> None:
    model = family_model(name)
    torch.testing.assert_close(packed(model, batch()), padded(model, batch()), atol=1e-5, rtol=1e-4)
    assert_same_gradients(model)


def test_an_adapter_gets_the_gradients_that_transformers_gives_it() -> None:
    model = family_model("qwen2")
    add_adapter(model, Lora(rank=2, alpha=4.0), seed=0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    assert_same_gradients(model)


def test_layers_computed_again_in_the_backward_pass_give_the_same_gradients() -> None:
    model, plain = family_model("llama"), family_model("llama")
    checkpoint_layers(model)
    calls: list[int] = []
    model.base_model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    again, once = gradients(packed, model), gradients(packed, plain)
    assert len(calls) == 2
    assert all(again[name].equal(expected) for name, expected in once.items())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_in_bfloat16_the_trunk_is_about_as_near_to_float32_as_transformers(name: str) -> None:
    model, rows = family_model(name), batch()
    with torch.no_grad():
        exact = padded(model, rows)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, theirs = packed_hidden(model, rows, torch.bfloat16), padded(model, rows)
    assert ours.dtype == torch.float32
    assert (ours - exact).norm() <= 1.3 * (theirs - exact).norm() <= 0.2 * exact.norm()


def test_actor_critic_and_reference_compute_packed() -> None:
    """No token of padding reaches a layer."""
    policy, critic, reference = (tiny_model(seed=seed) for seed in range(3))
    seen: list[int] = []
    for model in (policy, critic, reference):
        model.base_model.layers[0].mlp.down_proj.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    ActorCritic(policy, critic.base_model, torch.float32)(batch(), 1.0)
    Reference(reference, torch.float32).logprobs(batch(), 1.0)
    assert seen == [8 + 14 + 2 + 12] * 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "gelu"}, "its activation is gelu, not silu"),
        ({"model_type": "gemma"}, "its architecture is gemma, not one of llama, mistral, qwen2, qwen3"),
        ({"sliding_window": 8}, "its attention has a sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "its attention has a sliding window"),
    ],
)
def test_what_differs_from_the_family_is_named(change: dict[str, object], reason: str) -> None:
    model = tiny_model()
    assert why_not_family(model) is None
    for name, value in change.items():
        setattr(model.config, name, value)
    assert why_not_family(model) == reason
