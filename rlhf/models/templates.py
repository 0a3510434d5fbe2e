"""A chat template and an end-of-sequence token for checkpoints that have none of their own: base models."""

from __future__ import annotations

from pathlib import Path

from rlhf.errors import UserError
from rlhf.models import checkpoints

PLAIN = (
    "{% if bos_token and bos_token != eos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\nAnswer:\n' }}"
    "{% else %}{{ message['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
)
"""Question and answer as text, which any tokenizer has the words for."""
NAMED = {"plain": PLAIN}


def give(directory: Path, chat_template: str, eos_token: str) -> dict[str, str]:
    """Writes template and end-of-sequence token to the checkpoint in `directory`; what is empty stays as it is.

    `chat_template` is a name of `NAMED`, or Jinja. All checkpoints made from this one carry both. Returns what was
    given, by its param. Raises UserError for a token that the vocabulary lacks and a template that is none.
    """
    given = {"chat_template": chat_template, "eos_token": eos_token}
    if not any(given.values()):
        return {}
    tokenizer = checkpoints.read_tokenizer(directory)
    if eos_token:
        if eos_token not in tokenizer.get_vocab():
            raise UserError(f"sft.eos_token={eos_token}: no token of its vocabulary: name one that is")
        tokenizer.eos_token = eos_token
    if chat_template:
        text = NAMED.get(chat_template, chat_template)
        if "{{" not in text:
            raise UserError(f"sft.chat_template={chat_template}: no template: write {' or '.join(NAMED)}, or Jinja")
        tokenizer.chat_template = text
        for path in directory.glob("chat_template.*"):
            path.unlink()
    checkpoints.write_tokenizer(directory, tokenizer)
    return {name: value for name, value in given.items() if value}
