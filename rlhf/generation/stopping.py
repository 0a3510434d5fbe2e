"""When a response has ended, beyond its stop tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from transformers import PreTrainedTokenizerBase

from rlhf.data.prompts import decode_response


def stop_strings(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
    """Whether the text of a response has come to hold one of `strings`, asked after each of its tokens.

    Only as many last tokens are decoded as can hold a string: every token with text has at least a byte. One more is,
    because some tokenizers drop the space before the first. Special tokens have no text, and neither have ids that
    the tokenizer does not know. None where there are no strings; raises ValueError for an empty one.
    """
    if not strings:
        return None
    if not all(strings):
        raise ValueError("a stop string must not be empty")
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    with_text = set(tokenizer.get_vocab().values()) - special - {tokenizer.eos_token_id}
    width = max(len(string.encode()) for string in strings) + 1

    def stop(tokens: Sequence[int]) -> bool:
        if tokens[-1] not in with_text:
            return False
        last = list(islice((token for token in reversed(tokens) if token in with_text), width))
        text = decode_response(tokenizer, last[::-1])
        return any(string in text for string in strings)

    return stop
