"""Policy and critic: padding changes nothing, values start at 0, gradients and optimisers reach what they should."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from rlhf.models.actor_critic import ActorCritic, Reference, ValueHead, checkpoint_layers, rounded, sampling_copy
from rlhf.models.batches import TokenBatch, pad
from tests.tiny_models import ARCHITECTURES, EOS, random_tokens, tiny_model


def batch(pad_id: int = EOS) -> TokenBatch:
    """Four rows of lengths 8, 14, 4 and 12; longer than the sliding window of Gemma 2."""
    return pad(random_tokens([3, 9, 1, 6]), random_tokens([5, 5, 3, 6], seed=1), pad_id)


def actor_critic(architecture: str = "llama", separate: bool = False) -> ActorCritic:
    critic = tiny_model(architecture, seed=1).base_model if separate else None
    return ActorCritic(tiny_model(architecture), critic, torch.float32)


def with_random_head(model: ActorCritic) -> ActorCritic:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.nn.init.normal_(model.value_head.linear.weight)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("separate", [False, True])
def test_padding_changes_neither_log_probabilities_nor_values(architecture: str, separate: bool) -> None:
    model, rows = with_random_head(actor_critic(architecture, separate)), batch()
    with torch.no_grad():
        together = model(rows, 0.9)
        for row in range(len(rows)):
            alone = model(rows.select(torch.tensor([row])), 0.9)
            for whole, part in zip(together, alone, strict=True):
                torch.testing.assert_close(whole[row, : part.shape[1]], part[0], atol=2e-5, rtol=1e-4)
        for whole, other in zip(together, model(batch(pad_id=37), 0.9), strict=True):
            assert whole.equal(other)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_equal_a_plain_forward_pass_without_padding(architecture: str) -> None:
    model, rows = actor_critic(architecture), batch()
    with torch.no_grad():
        actions = model(rows, 0.9)
        for row, (start, end) in enumerate(zip(rows.prompt_lengths.tolist(), rows.lengths.tolist(), strict=True)):
            tokens = rows.tokens[row : row + 1, :end]
            log_probs = torch.log_softmax(model.policy(tokens).logits[0, start - 1 : -1] / 0.9, dim=-1)
            expected = log_probs.gather(-1, tokens[0, start:, None]).squeeze(-1)
            torch.testing.assert_close(actions.logprobs[row][rows.mask[row]], expected, atol=2e-5, rtol=1e-4)


def test_everything_is_float32_and_zero_off_the_mask() -> None:
    rows = batch()
    for tensor in with_random_head(actor_critic())(rows, 1.0):
        assert tensor.shape == rows.mask.shape and tensor.dtype == torch.float32
        assert not tensor[~rows.mask].any() and tensor[rows.mask].all()


@pytest.mark.parametrize("separate", [False, True])
def test_values_start_at_zero(separate: bool) -> None:
    assert not actor_critic(separate=separate)(batch(), 1.0).values.any()


def test_values_are_read_before_the_action() -> None:
    """A later token must not change the value of an action, nor its log-probability."""
    rows, model = batch(), with_random_head(actor_critic())
    changed = rows.tokens.clone()
    last = int(rows.lengths[0]) - 1
    changed[0, last] = (changed[0, last] + 1) % 48
    with torch.no_grad():
        before, after = model(rows, 1.0), model(TokenBatch(changed, rows.prompt_lengths, rows.lengths), 1.0)
    assert before.values[0].equal(after.values[0])
    assert before.logprobs[0, : last - 1].equal(after.logprobs[0, : last - 1])
    assert before.logprobs[0, last - 1] != after.logprobs[0, last - 1]


def reached(model: ActorCritic) -> set[str]:
    return {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


@pytest.mark.parametrize("separate", [False, True])
def test_critic_warm_up_gives_the_policy_no_gradient(separate: bool) -> None:
    model = with_random_head(actor_critic(separate=separate))
    model(batch(), 1.0, train_policy=False).values.sum().backward()
    assert all(p.grad is None for p in model.policy.parameters())
    assert reached(model) == ({"critic", "value_head"} if separate else {"value_head"})


def test_the_value_loss_trains_a_shared_trunk_and_leaves_a_policy_with_its_own_critic_alone() -> None:
    shared, separate = with_random_head(actor_critic()), with_random_head(actor_critic(separate=True))
    for model in (shared, separate):
        model(batch(), 1.0).values.sum().backward()
    assert reached(shared) == {"policy", "value_head"}
    assert reached(separate) == {"critic", "value_head"}
    separate.zero_grad()
    separate(batch(), 1.0).logprobs.sum().backward()
    assert reached(separate) == {"policy"}


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # tied and untied
@pytest.mark.parametrize("separate", [False, True])
def test_optimisers_hold_every_trained_parameter_exactly_once(architecture: str, separate: bool) -> None:
    model = with_random_head(actor_critic(architecture, separate))
    optimisers = model.optimised(1e-3, 1e-2)
    groups = [group for optimiser in optimisers for group in optimiser]
    assert len(optimisers) == (2 if separate else 1)
    assert {group["role"]: group["lr"] for group in groups} == {"policy": 1e-3, "critic": 1e-2}
    held = [id(p) for group in groups for p in group["params"]]  # type: ignore[attr-defined]
    actions = model(batch(), 1.0)
    (actions.logprobs.sum() + actions.values.sum()).backward()
    trained = {id(p) for p in model.parameters() if p.grad is not None}
    assert len(held) == len(set(held))
    assert set(held) == trained
    if separate:
        assert [group["role"] for group in optimisers[0]] == ["policy"]
        assert {group["role"] for group in optimisers[1]} == {"critic"}


def test_the_reference_is_frozen_and_equals_the_policy_it_was() -> None:
    rows, model = batch(), actor_critic()
    reference = Reference(tiny_model(), torch.float32)
    with torch.no_grad():
        expected = model(rows, 0.7).logprobs
    got = reference.logprobs(rows, 0.7)
    assert got.equal(expected) and not got.requires_grad


def test_dropout_stays_off() -> None:
    policy = tiny_model("gpt2").train()
    model = ActorCritic(policy, None, torch.float32)
    assert not any(module.training for module in model.modules())
    assert model(batch(), 1.0).logprobs.equal(model(batch(), 1.0).logprobs)


def test_sampling_copies_only_where_the_precision_differs() -> None:
    model = tiny_model()
    assert sampling_copy(model, torch.float32) is model
    copy = sampling_copy(model, torch.bfloat16)
    assert copy.dtype == torch.bfloat16 and model.dtype == torch.float32 and not copy.training


def test_bfloat16_products_stay_close_and_return_float32() -> None:
    def logprobs(dtype: torch.dtype) -> Tensor:
        return ActorCritic(tiny_model(spread=1.0), None, dtype)(batch(), 1.0).logprobs

    assert logprobs(torch.bfloat16).dtype == torch.float32
    torch.testing.assert_close(logprobs(torch.bfloat16), logprobs(torch.float32), atol=5e-2, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("separate", [False, True])
def test_computing_layers_again_changes_no_gradient_and_no_response(architecture: str, separate: bool) -> None:
    plain, again = (with_random_head(actor_critic(architecture, separate)) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a function of transformers that is about to go would tell in every run
        checkpoint_layers(again)
    assert any(module.training for module in again.modules())
    assert not any(module.training for module in again.modules() if isinstance(module, torch.nn.Dropout))
    saved: list[list[int]] = []
    for model in (plain, again):
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: k.append(t.numel()) or t, lambda t: t):  # type: ignore[misc]
            actions = model(batch(), 1.0)
        (actions.logprobs.sum() + actions.values.square().sum()).backward()
        saved.append(kept)
    assert sum(saved[1]) < sum(saved[0]) / 2
    for (name, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5, msg=name)


def test_a_value_head_starts_from_a_normalised_score() -> None:
    head = ValueHead(3)
    head.start_from(torch.tensor([[1.0, 2.0, -1.0]]), mean=0.5, std=2.0)
    hidden = torch.tensor([[[1.0, 1.0, 1.0], [0.0, 2.0, 0.5], [9.0, 9.0, 9.0]]])
    values = head(hidden, torch.tensor([[True, True]]))
    assert values.tolist() == [[(2.0 - 0.5) / 2, (3.5 - 0.5) / 2]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_rounded_model_says_the_same_to_the_last_bit(architecture: str) -> None:
    rows, bf16 = batch(), torch.bfloat16
    plain, kept = tiny_model(architecture), rounded(tiny_model(architecture), bf16)
    assert Reference(kept, bf16).logprobs(rows, 0.7).equal(Reference(plain, bf16).logprobs(rows, 0.7))
    sizes = [sum(weight.nbytes for weight in model.parameters()) for model in (kept, plain)]
    assert sizes[0] < sizes[1] or architecture == "gpt2"  # whose matrices are Conv1D
