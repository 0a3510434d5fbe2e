"""Prompts and responses as tokens, on a small byte-level tokenizer made here."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.data.prompts import decode_response, encode_prompts, encode_response, render_prompt, sequence_length
from rlhf.errors import UserError
from rlhf.params import Prompt

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPT = Prompt(system="", template="Solve: {question}", max_tokens=40)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<end>", "<user>", "<assistant>", "<system>"])
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", chat_template=TEMPLATE)
    made.name_or_path = "models/own"
    return made


def text_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def test_prompt_is_the_chat_up_to_the_response(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = render_prompt(tokenizer, "1+1 {x}?", PROMPT)
    assert all(isinstance(token, int) for token in ids)
    assert text_of(tokenizer, ids) == "<user>Solve: 1+1 {x}?<end><assistant>"
    system = PROMPT.model_copy(update={"system": "Be right."})
    rendered = text_of(tokenizer, render_prompt(tokenizer, "1+1?", system))
    assert rendered == "<system>Be right.<end><user>Solve: 1+1?<end><assistant>"


def test_a_question_stays_literal(tokenizer: PreTrainedTokenizerFast) -> None:
    rendered = text_of(tokenizer, render_prompt(tokenizer, "{question} {0} {{ 1 }}", PROMPT))
    assert rendered == "<user>Solve: {question} {0} {{ 1 }}<end><assistant>"


def test_prompts_over_the_limit_are_none(tokenizer: PreTrainedTokenizerFast) -> None:
    """Three special tokens, seven for `Solve: `: thirty are left for the question."""
    fits, too_long = encode_prompts(tokenizer, ["a" * 30, "a" * 31], PROMPT)
    assert fits == render_prompt(tokenizer, "a" * 30, PROMPT)
    assert len(fits) == 40
    assert too_long is None


def test_a_sequence_is_as_long_as_its_prompt_and_its_longest_response(tokenizer: PreTrainedTokenizerFast) -> None:
    """Three special tokens, seven for `Solve: `, two for the question, three and the end for the response."""
    assert sequence_length(tokenizer, "ab", ["x", "xyz"], PROMPT) == 16


@pytest.mark.parametrize("text", ["It is 5.\n#### 5", "", " 3*4 = <<3*4=12>>12 .\n", "\u2212\u00a0\u20ac \U0001f600"])
def test_responses_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = encode_response(tokenizer, text)
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1
    assert decode_response(tokenizer, ids) == text
    assert decode_response(tokenizer, ids[:-1]) == text


def test_an_end_inside_a_text_does_not_end_it_early(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode_response(tokenizer, "5<end>6")
    assert ids == [*encode_response(tokenizer, "56")]


def test_tokens_after_a_special_one_are_kept_but_not_the_special_one(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [*tokenizer.encode("5", add_special_tokens=False), tokenizer.convert_tokens_to_ids("<user>")]
    assert decode_response(tokenizer, ids) == "5"


def test_a_checkpoint_without_template_or_end_is_refused_by_name(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"models/own has no chat template"):
        render_prompt(tokenizer, "a", PROMPT)
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, None
    for call in (lambda: render_prompt(tokenizer, "a", PROMPT), lambda: encode_response(tokenizer, "a")):
        with pytest.raises(UserError, match=r"models/own has no end-of-sequence token"):
            call()
