"""Chunked log-probabilities against a full log-softmax, of the model's own logits and in float64, whole and truncated:
values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rlhf.models.token_logprobs import output_logits, token_logprobs
from tests.tiny_models import ARCHITECTURES, PAD, VOCABULARY, random_tokens, tiny_model

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


def float64_reference(
    hidden: Tensor, weight: Tensor, cap: float | None, targets: Tensor, temperature: float, kept: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Row by row, in float64, from one full log-softmax over the ids that count."""
    logits = hidden.double() @ weight.double().T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logprobs, entropies = [], []
    for row, target, ids in zip(logits / temperature, targets.tolist(), kept, strict=True):
        log_probs = torch.log_softmax(row[ids], dim=-1)
        logprobs.append(log_probs[ids.index(target)])
        entropies.append(-(log_probs.exp() * log_probs).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])  # without softcapping and with it
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_values_and_gradients_equal_a_full_log_softmax_in_float64(
    chunk: int, truncated: bool, architecture: str
) -> None:
    model = tiny_model(architecture, spread=10.0)
    head, cap = model.get_output_embeddings().weight, getattr(model.config, "final_logit_softcapping", None)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, 16, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    weights = torch.randn(2, ROWS, generator=generator)
    kept = kept_ids(targets) if truncated else [list(range(VOCABULARY))] * ROWS
    padded = padded_ids(kept) if truncated else None

    expected = float64_reference(hidden, head, cap, targets, 0.7, kept)
    expected_gradients = torch.autograd.grad((weights * torch.stack(expected)).sum(), [hidden, head])
    got = token_logprobs(model, hidden, targets, 0.7, chunk, padded)
    got_gradients = torch.autograd.grad((weights * torch.stack(got)).sum(), [hidden, head])
    for ours, reference in zip((*got, *got_gradients), (*expected, *expected_gradients), strict=True):
        torch.testing.assert_close(ours.double(), reference.double(), atol=2e-5, rtol=2e-5)
    with torch.no_grad():
        without_gradient = token_logprobs(model, hidden, targets, 0.7, chunk, padded)
    assert all(one.equal(other) for one, other in zip(got, without_gradient, strict=True))


def kept_ids(targets: Tensor) -> list[list[int]]:
    """For row i the target and i more ids, ascending; token 0, which stands in for padding, only where it is drawn."""
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(VOCABULARY, generator=generator).tolist() for _ in targets]
    return [
        sorted([target, *[token for token in order if token != target][:row]])
        for row, (target, order) in enumerate(zip(targets.tolist(), orders, strict=True))
    ]


def padded_ids(kept: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(ids, dtype=torch.int32) for ids in kept], batch_first=True, padding_value=-1)


def test_truncated_values_by_hand() -> None:
    """Of a zero head's equal logits k are kept: log-probability -log k, entropy log k."""
    model = tiny_model("qwen2")
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    kept = torch.tensor([[5, -1, -1], [0, 9, -1], [7, 8, 9]])
    logprobs, entropy = token_logprobs(model, torch.randn(3, 16), torch.tensor([5, 9, 7]), 0.5, kept=kept)
    torch.testing.assert_close(entropy, torch.tensor([1.0, 2.0, 3.0]).log())
    torch.testing.assert_close(logprobs, -entropy)


def test_a_far_larger_logit_that_was_cut_leaves_values_and_gradients_finite() -> None:
    """Padding reads token 0: neither its overflow nor its gradient may come through."""
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.get_output_embeddings().weight[0] = 1e4
    hidden = torch.ones(1, 16, requires_grad=True)
    kept = torch.tensor([[5, 6, -1]])
    logprobs, entropy = token_logprobs(model, hidden, torch.tensor([5]), kept=kept)
    (logprobs + entropy).sum().backward()
    assert hidden.grad is not None and logprobs.isfinite().all() and entropy.isfinite().all()
    assert hidden.grad.isfinite().all() and not model.get_output_embeddings().weight.grad[0].any()


@pytest.mark.parametrize("kept", [[[3, 5], [4, 6]], [[3, 5], [-1, -1]]])
def test_a_target_that_was_cut_is_refused(kept: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="every target must be among the kept ids"):
        token_logprobs(tiny_model(), torch.randn(2, 16), torch.tensor([5, 5]), kept=torch.tensor(kept))


@pytest.mark.parametrize("truncated", [False, True])
def test_no_logits_are_kept_for_the_backward_pass(truncated: bool) -> None:
    model, hidden, targets = tiny_model(), torch.randn(ROWS, 16, requires_grad=True), torch.arange(ROWS)
    saved: list[torch.Size] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        token_logprobs(model, hidden, targets, chunk=4, kept=targets[:, None] if truncated else None)
        assert saved and not [shape for shape in saved if shape[-1] == VOCABULARY]
        torch.log_softmax(output_logits(model, hidden), dim=-1)
        assert (ROWS, VOCABULARY) in saved


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_left_right_or_none_gives_the_same_values_and_gradients(architecture: str) -> None:
    model, rows = tiny_model(architecture), random_tokens([3, 11, 7])
    width = max(map(len, rows))
    layouts = {
        "none": [[row] for row in rows],
        "right": [[row + [PAD] * (width - len(row)) for row in rows]],
        "left": [[[PAD] * (width - len(row)) + row for row in rows]],
    }
    results = {}
    for side, batches in layouts.items():
        pieces = [of_real_tokens(model, torch.tensor(batch)) for batch in batches]
        logprobs, entropy = (torch.cat(column) for column in zip(*pieces, strict=True))
        weights = torch.linspace(-1, 1, len(logprobs))
        results[side] = logprobs, entropy, gradients(model, (weights * logprobs + 0.3 * entropy).sum())
    for side in ("left", "right"):
        for got, expected in zip(results[side][:2], results["none"][:2], strict=True):
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4, msg=side)
        for name, gradient in results[side][2].items():
            torch.testing.assert_close(gradient, results["none"][2][name], atol=2e-4, rtol=2e-4, msg=f"{side} {name}")


def of_real_tokens(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of all tokens but padding and each row's first, row by row."""
    real = tokens != PAD
    positions = (real.cumsum(dim=-1) - 1).clamp_min(0)
    hidden = model.base_model(tokens, attention_mask=real.long(), position_ids=positions).last_hidden_state
    actions = real[:, :-1] & real[:, 1:]
    return token_logprobs(model, hidden[:, :-1][actions], tokens[:, 1:][actions], 0.9)


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
