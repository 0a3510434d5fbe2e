"""From questions to prompt tokens and from responses to tokens and back: the same on every side of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlhf.errors import UserError
from rlhf.params import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError that names the checkpoint if it has no chat template or no end-of-sequence token."""
    name = getattr(tokenizer, "name_or_path", "") or "the checkpoint"
    if not tokenizer.chat_template:
        raise UserError(f"{name} has no chat template: choose an instruction-tuned checkpoint with sft.source")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name} has no end-of-sequence token: set eos_token in its tokenizer_config.json")


def is_text(question: str) -> bool:
    """Whether no tokenizer would fail at it: half a surrogate pair, from JSON or a terminal, is no character."""
    return not any("\ud800" <= character <= "\udfff" for character in question)


def render_prompt(tokenizer: PreTrainedTokenizerBase, question: str, prompt: Prompt) -> list[int]:
    """The token ids of the chat up to where the response begins.

    Raises UserError if the tokenizer has no chat template or no end-of-sequence token.
    """
    check_tokenizer(tokenizer)
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    messages.append({"role": "user", "content": prompt.template.replace("{question}", question)})
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(ids)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, questions: Iterable[str], prompt: Prompt
) -> list[list[int] | None]:
    """One prompt a question; None where it is longer than `prompt.max_tokens`."""
    prompts = [render_prompt(tokenizer, question, prompt) for question in questions]
    return [ids if len(ids) <= prompt.max_tokens else None for ids in prompts]


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The token ids of a whole response; it ends with the end-of-sequence id and holds no other one."""
    check_tokenizer(tokenizer)
    end = tokenizer.eos_token_id
    return [token for token in tokenizer.encode(text, add_special_tokens=False) if token != end] + [end]


def sequence_length(tokenizer: PreTrainedTokenizerBase, question: str, responses: Iterable[str], prompt: Prompt) -> int:
    """Tokens of the prompt with the longest of the responses."""
    longest = max(len(encode_response(tokenizer, text)) for text in responses)
    return len(render_prompt(tokenizer, question, prompt)) + longest


def decode_response(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of response tokens, without the end-of-sequence and other special tokens."""
    tokens = [token for token in ids if token != tokenizer.eos_token_id]
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
