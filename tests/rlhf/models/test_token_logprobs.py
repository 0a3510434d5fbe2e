"""Chunked log-probabilities against a full log-softmax of the model's own logits: values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.models.token_logprobs import output_logits, token_logprobs
from tests.tiny_models import ARCHITECTURES, VOCABULARY, random_tokens, tiny_model

ROWS = 11


def tokens_and_targets() -> tuple[Tensor, Tensor]:
    tokens = torch.tensor(random_tokens([ROWS + 1]))
    return tokens[:, :-1], tokens[0, 1:]


def naive(model: PreTrainedModel, tokens: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_probs = torch.log_softmax(model(tokens).logits[0].float() / temperature, dim=-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(dim=-1)


def chunked(
    model: PreTrainedModel, tokens: Tensor, targets: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    return token_logprobs(model, model.base_model(tokens).last_hidden_state[0], targets, temperature, chunk)


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_the_models_own(architecture: str) -> None:
    model, (tokens, _) = tiny_model(architecture), tokens_and_targets()
    with torch.no_grad():
        logits = output_logits(model, model.base_model(tokens).last_hidden_state)
        torch.testing.assert_close(logits, model(tokens).logits, atol=1e-5, rtol=1e-5)
    assert logits.shape == (1, ROWS, VOCABULARY) and logits.dtype == torch.float32


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, 512), (0.7, 4), (1.5, 1), (1.0, ROWS)])
def test_values_and_gradients_equal_the_naive_ones(architecture: str, temperature: float, chunk: int) -> None:
    model, (tokens, targets) = tiny_model(architecture), tokens_and_targets()
    weights = torch.linspace(-1, 2, ROWS)
    expected, expected_entropy = naive(model, tokens, targets, temperature)
    expected_gradients = gradients(model, (weights * expected + 0.3 * expected_entropy).sum())
    got, entropy = chunked(model, tokens, targets, temperature, chunk)
    got_gradients = gradients(model, (weights * got + 0.3 * entropy).sum())
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    assert got_gradients.keys() == expected_gradients.keys()
    for name, gradient in got_gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=2e-4, rtol=2e-4, msg=name)


def test_entropy_by_hand() -> None:
    """The logits of a zero head are all 0: entropy log V, each log-probability -log V, at any temperature."""
    model = tiny_model("qwen2")
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    logprobs, entropy = token_logprobs(model, torch.randn(3, 16), torch.tensor([0, 5, 47]), 0.5)
    expected = torch.full((3,), float(torch.tensor(float(VOCABULARY)).log()))
    torch.testing.assert_close(entropy, expected)
    torch.testing.assert_close(logprobs, -expected)


def test_logits_of_a_bfloat16_model_come_in_float32() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    logprobs, entropy = token_logprobs(model, torch.randn(3, 16, dtype=torch.bfloat16), torch.tensor([0, 5, 47]))
    assert logprobs.dtype == entropy.dtype == torch.float32


def test_scaled_logits_of_other_architectures() -> None:
    """Cohere multiplies its logits by `logit_scale`, Granite divides them by `logits_scaling`."""
    model, hidden = tiny_model("llama"), torch.randn(2, 16)
    plain = output_logits(model, hidden)
    model.config.logit_scale = 0.25
    torch.testing.assert_close(output_logits(model, hidden), plain * 0.25)
    model.config.logit_scale, model.config.logits_scaling = None, 8.0
    torch.testing.assert_close(output_logits(model, hidden), plain / 8)
