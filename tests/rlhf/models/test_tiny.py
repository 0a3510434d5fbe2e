from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from rlhf.models import checkpoints
from rlhf.models.tiny import make_tiny, make_tokenizer
from rlhf.params import Tiny

SHAPE = Tiny(hidden_size=32, layers=2, heads=2, intermediate_size=64, context=96, vocabulary=300)
TEXT = "Natalia’s 480 clips cost £1,234.50 — naïve? 中文 😀\n\tYes: 6*3=<<6*3=18>>18 #### 18  "


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer(vocabulary=300, context=96)


def test_the_seed_decides_every_weight_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (make_tiny(SHAPE, seed)[0].state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_tiny_scale_has_the_parameters_counted_by_hand() -> None:
    shape = Tiny(hidden_size=128, layers=3, heads=4, intermediate_size=256, context=320, vocabulary=480)
    model, tokenizer = make_tiny(shape, seed=0)
    layer = 4 * 128 * 128 + 3 * 128 * 256 + 2 * 128
    assert len(tokenizer) == 480
    assert model.num_parameters() == 480 * 128 + 3 * layer + 128 == 553_856
    assert model.config.max_position_embeddings == 320


def test_any_text_survives(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize(("text", "tokens"), [("480", ["4", "8", "0"]), (" 480", ["Ġ", "4", "8", "0"])])
def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerBase, text: str, tokens: list[str]) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens


def test_no_token_holds_two_digits_or_exceeds_the_limit(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) <= 300
    assert not [token for token in tokenizer.get_vocab() if sum(letter.isdigit() for letter in token) > 1]


def test_words_of_the_problems_are_merged(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer.encode("How many")) < len("How many") / 2


def test_the_tokenizer_is_the_same_every_time(tokenizer: PreTrainedTokenizerBase) -> None:
    again = make_tokenizer(vocabulary=300, context=96)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_the_special_tokens_come_first_and_pad_is_not_end(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|end|>")


def test_the_chat_template_opens_turns_and_ends_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "Be brief.\n<|user|>1+1?<|assistant|>2<|end|><|user|>2+2?<|assistant|>"
    ids = tokenizer.apply_chat_template(chat[1:2], add_generation_prompt=True, return_dict=False)
    assert (ids[0], ids[-1]) == (2, 3)


def test_it_loads_with_transformers_alone(tmp_path: Path) -> None:
    model, tokenizer = make_tiny(SHAPE, seed=0)
    checkpoints.write_model(tmp_path, model, tokenizer)
    loaded, plain = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = plain.encode(TEXT)
    assert ids == tokenizer.encode(TEXT)
    assert plain.chat_template == tokenizer.chat_template
    with torch.no_grad():
        assert torch.equal(loaded(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
