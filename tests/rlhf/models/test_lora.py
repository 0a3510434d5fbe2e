"""Adapters: what they add and where; off they are not there, merged they are the same, and peft reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.errors import UserError
from rlhf.models.actor_critic import ActorCritic, Reference, checkpoint_layers, sampling_copy
from rlhf.models.batches import TokenBatch, pad
from rlhf.models.checkpoints import Manifest, load_policy, verify_files, write_manifest, write_model
from rlhf.models.lora import adapter_off, add_adapter, has_adapter, merged, write_adapter
from rlhf.params import Lora
from tests.tiny_models import ARCHITECTURES, EOS, random_tokens, tiny_model, tiny_tokenizer

RANK, ALPHA = 4, 6.0
SETTINGS = Lora(rank=RANK, alpha=ALPHA)


def batch() -> TokenBatch:
    return pad(random_tokens([3, 9, 1, 6]), random_tokens([5, 5, 3, 6], seed=1), EOS)


def fresh(architecture: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A model whose adapter changes nothing yet."""
    model = tiny_model(architecture)
    add_adapter(model, SETTINGS, seed)
    return model


def trained(architecture: str = "llama") -> PreTrainedModel:
    """A model whose adapter changes a lot."""
    model = fresh(architecture)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.1, generator=generator)
    return model


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    rows = batch()
    return model(input_ids=rows.tokens, attention_mask=rows.attention_mask).logits


def adapter(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_linear_layer_but_the_outputs_has_an_adapter_that_changes_nothing_at_first(architecture: str) -> None:
    plain, model = tiny_model(architecture), fresh(architecture)
    output = plain.get_output_embeddings()
    linear = {n for n, part in plain.named_modules() if isinstance(part, nn.Linear | Conv1D) and part is not output}
    assert {name.split(".lora_")[0] for name in adapter(model)} == linear
    assert len(adapter(model)) == 2 * len(linear)
    assert logits(model).equal(logits(plain))
    assert has_adapter(model) and not has_adapter(plain)


def test_only_the_adapter_is_trained_and_it_is_small() -> None:
    """Llama of width 16 and 24, with 8 for keys and values: rank x (in + out) of seven matrices in each of 2 layers."""
    model = fresh()
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert sizes.keys() == adapter(model).keys()
    assert sum(sizes.values()) == 2 * RANK * (2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 24))


@pytest.mark.parametrize("separate", [False, True])
def test_optimisers_hold_adapter_and_critic_alone(separate: bool) -> None:
    critic = tiny_model(seed=1).base_model if separate else None
    model = ActorCritic(fresh(), critic, torch.float32)
    names = {name for name, _ in model.trained_parameters()}
    expected = {f"policy.{name}" for name in adapter(model.policy)} | {"value_head.linear.weight"}
    expected |= {"value_head.linear.bias"} | {f"critic.{n}" for n, _ in (critic or nn.Module()).named_parameters()}
    assert names == expected
    held = [p for optimiser in model.optimised(1e-3, 1e-2) for group in optimiser for p in group["params"]]  # type: ignore[attr-defined]
    assert {id(p) for p in held} == {id(p) for _, p in model.trained_parameters()}


def test_the_adapter_is_drawn_by_the_seed_alone() -> None:
    torch.manual_seed(5)
    next_number = torch.rand(1)
    torch.manual_seed(5)
    one = adapter(fresh(seed=3))
    assert torch.rand(1).equal(next_number)
    again, other = adapter(fresh(seed=3)), adapter(fresh(seed=4))
    assert all(weight.equal(again[name]) for name, weight in one.items())
    assert not any(weight.equal(other[name]) for name, weight in one.items() if "lora_A" in name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_merged_it_is_a_plain_model_of_the_same_outputs(architecture: str) -> None:
    plain, model = tiny_model(architecture), trained(architecture)
    before = adapter(model)
    copy = merged(model)
    assert copy.state_dict().keys() == plain.state_dict().keys()
    assert {n: type(p) for n, p in copy.named_modules()} == {n: type(p) for n, p in plain.named_modules()}
    torch.testing.assert_close(logits(copy), logits(model), atol=1e-5, rtol=1e-5)
    assert (logits(copy) - logits(plain)).abs().max() > 0.01
    assert not has_adapter(copy) and has_adapter(model)
    assert all(weight.equal(before[name]) for name, weight in adapter(model).items())
    with adapter_off(model):
        assert logits(model).equal(logits(plain))
    assert merged(plain) is plain


def test_merged_weights_are_those_of_the_paper() -> None:
    model, name = trained(), "model.layers.1.mlp.down_proj"
    layer = model.get_submodule(name)
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    expected = layer.base_layer.weight + (ALPHA / RANK) * torch.einsum("or,ri->oi", b, a)
    torch.testing.assert_close(merged(model).get_submodule(name).weight, expected, atol=1e-6, rtol=1e-6)


def test_what_is_sampled_from_is_merged() -> None:
    model, plain = trained(), tiny_model()
    sampled = sampling_copy(model, torch.float32)
    torch.testing.assert_close(logits(sampled), logits(model), atol=1e-5, rtol=1e-5)
    rounded = sampling_copy(model, torch.bfloat16)
    for name, weight in rounded.state_dict().items():
        assert weight.equal(sampled.state_dict()[name].bfloat16())
    assert rounded.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_policy_without_its_adapter(dtype: torch.dtype) -> None:
    rows, policy = batch(), trained()
    reference = Reference(policy, dtype)
    got = reference.logprobs(rows, 0.7)
    assert got.equal(Reference(tiny_model(), dtype).logprobs(rows, 0.7)) and not got.requires_grad
    model = ActorCritic(policy, None, dtype)
    before = model(rows, 0.7).logprobs
    assert (before - got).abs().max() > 0.01
    assert model(rows, 0.7).logprobs.equal(before)
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == adapter(policy).keys()


def test_an_error_within_turns_the_adapter_on_again() -> None:
    model = trained()
    before = logits(model)
    with pytest.raises(KeyError), adapter_off(model):
        raise KeyError
    assert logits(model).equal(before)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computing_layers_again_leaves_the_adapters_gradient(architecture: str, dtype: torch.dtype) -> None:
    """No input of a layer needs a gradient: the base is frozen."""
    plain, again = (ActorCritic(trained(architecture), None, dtype) for _ in range(2))
    checkpoint_layers(again)
    for model in (plain, again):
        Reference(model.policy, dtype).logprobs(batch(), 1.0)
        model(batch(), 1.0).logprobs.sum().backward()
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.0, "rtol": 0.0}
    for (name, one), other in zip(plain.policy.named_parameters(), again.policy.parameters(), strict=True):
        if "lora_" not in name:
            assert one.grad is None and other.grad is None
            continue
        assert one.grad is not None and one.grad.any() and one.grad.dtype == one.dtype == torch.float32, name
        torch.testing.assert_close(one.grad, other.grad, **tolerance, msg=name)  # type: ignore[arg-type]
    assert sampling_copy(again.policy, dtype).training is False


def save(directory: Path, model: PreTrainedModel) -> None:
    directory.mkdir()
    write_model(directory, merged(model), tiny_tokenizer())
    write_adapter(directory / "adapter", model)
    write_manifest(directory, Manifest(kind="policy", source="tiny:", stop_token="w1"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_peft_loads_the_adapter_and_we_the_merged_policy(architecture: str, tmp_path: Path) -> None:
    model = trained(architecture)
    save(tmp_path / "policy", model)
    theirs = PeftModel.from_pretrained(tiny_model(architecture), tmp_path / "policy" / "adapter")
    assert logits(theirs).equal(logits(model))
    assert logits(load_policy(tmp_path / "policy")).equal(logits(merged(model)))


def test_the_files_are_the_same_bytes_without_a_path_and_in_the_manifest(tmp_path: Path) -> None:
    for name in ("one", "other"):
        save(tmp_path / name, trained())
    names = ["adapter_config.json", "adapter_model.safetensors"]
    one, other = tmp_path / "one/adapter", tmp_path / "other/adapter"
    assert sorted(path.name for path in one.iterdir()) == names
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)
    config = json.loads((one / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (RANK, ALPHA, 0.0)
    assert config["base_model_name_or_path"] is None
    assert config["target_modules"] == sorted(config["target_modules"])
    verify_files(tmp_path / "one")
    with (one / names[1]).open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"adapter/adapter_model\.safetensors is not what"):
        load_policy(tmp_path / "one")
