"""The reward model gives what transformers' own sequence classifier gives, padded as that pads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf.models.batches import TokenBatch, pad
from rlhf.models.reward_model import from_policy, raw_scores
from tests.tiny_models import ARCHITECTURES, EOS, PAD, random_tokens, tiny_model


def batch() -> TokenBatch:
    responses = [[*tokens, EOS] for tokens in random_tokens([4, 1, 6], seed=1)]
    return pad(random_tokens([3, 9, 2]), responses, PAD)


def reward_model(architecture: str) -> PreTrainedModel:
    model = from_policy(tiny_model(architecture), PAD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.nn.init.normal_(model.score.weight)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_starts_at_score_zero_on_the_policys_trunk(architecture: str) -> None:
    policy = tiny_model(architecture)
    model = from_policy(policy, PAD)
    assert not raw_scores(model, batch(), torch.float32).any()
    assert model.config.num_labels == 1 and model.config.pad_token_id == PAD and not model.training
    trunk = model.base_model.state_dict()
    assert trunk.keys() == policy.base_model.state_dict().keys()
    assert all(weight.equal(trunk[name]) for name, weight in policy.base_model.state_dict().items())


def test_shares_no_memory_with_the_policy_and_leaves_its_config() -> None:
    policy = tiny_model()
    model = from_policy(policy, EOS + 1)
    with torch.no_grad():
        next(model.base_model.parameters()).add_(1)
    assert next(policy.base_model.parameters()).equal(next(tiny_model().base_model.parameters()))
    assert policy.config.pad_token_id == PAD


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_the_plain_sequence_classifier_after_saving(architecture: str, tmp_path: Path) -> None:
    model, rows = reward_model(architecture), batch()
    model.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = plain(rows.tokens, attention_mask=rows.attention_mask).logits.squeeze(-1)
        scores = raw_scores(model, rows, torch.float32)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert scores.unique().numel() == len(rows)


def test_padding_and_the_pad_token_change_nothing() -> None:
    model, rows = reward_model("llama"), batch()
    with torch.no_grad():
        together = raw_scores(model, rows, torch.float32)
        alone = [raw_scores(model, rows.select(torch.tensor([row])), torch.float32) for row in range(len(rows))]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_scores_the_end_of_sequence_token_itself() -> None:
    """With end-of-sequence as padding, a classifier that infers lengths would read one token too early."""
    model, rows = reward_model("llama"), batch()
    other = TokenBatch(rows.tokens.masked_fill(rows.attention_mask == 0, EOS), rows.prompt_lengths, rows.lengths)
    with torch.no_grad():
        assert raw_scores(model, other, torch.float32).equal(raw_scores(model, rows, torch.float32))
        cut = TokenBatch(rows.tokens, rows.prompt_lengths, rows.lengths - 1)
        assert not raw_scores(model, cut, torch.float32).equal(raw_scores(model, rows, torch.float32))
