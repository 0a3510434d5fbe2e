"""Stop strings against a search in the whole decoded text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.data.prompts import decode_response
from rlhf.generation.stopping import stop_strings
from rlhf.models.tiny import END, PAD, USER, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level, with a few merges."""
    return make_tokenizer(vocabulary=300, context=64)


def first_stop(stop: Callable[[Sequence[int]], bool] | None, tokens: list[int]) -> int | None:
    assert stop is not None
    return next((length for length in range(1, len(tokens) + 1) if stop(tokens[:length])), None)


def first_in_the_whole_text(tokenizer: PreTrainedTokenizerBase, strings: list[str], tokens: list[int]) -> int | None:
    texts = (decode_response(tokenizer, tokens[:length]) for length in range(1, len(tokens) + 1))
    return next((place + 1 for place, text in enumerate(texts) if any(s in text for s in strings)), None)


@pytest.mark.parametrize("strings", [["\n"], ["\n\n", "7"], [" the"], ["ab", "→"], ["é→ 🙂"], ["zqz"]])
def test_stops_where_the_whole_text_first_holds_a_string(
    tokenizer: PreTrainedTokenizerBase, strings: list[str]
) -> None:
    """Random tokens, special ones and broken characters among them, with the strings' own tokens in between."""
    generator, stop, stopped = np.random.default_rng(0), stop_strings(tokenizer, strings), 0
    specials = tokenizer.convert_tokens_to_ids([PAD, END, USER])
    pieces = [tokenizer.encode(string, add_special_tokens=False) for string in strings]
    for _ in range(60):
        tokens: list[int] = []
        while len(tokens) < 40:
            piece = pieces[generator.integers(len(pieces))]
            cut = generator.integers(len(piece) + 1)
            tokens += generator.integers(len(tokenizer), size=3).tolist() + piece[:cut]
            tokens += [specials[generator.integers(3)]] * int(generator.integers(3)) + piece[cut:]
        expected = first_in_the_whole_text(tokenizer, strings, tokens)
        assert first_stop(stop, tokens) == expected
        stopped += expected is not None
    assert stopped > 10


def test_a_string_may_span_tokens_or_sit_inside_one(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.encode("so 3 + 4 = 7\n#### 7", add_special_tokens=False)
    assert first_stop(stop_strings(tokenizer, ["####"]), tokens) == len(tokens) - 2
    merged = next(token for text, token in tokenizer.get_vocab().items() if len(text) >= 4 and text.isalpha())
    inside = decode_response(tokenizer, [merged])[1:3]
    assert first_stop(stop_strings(tokenizer, [inside]), [tokens[0], merged]) == 2


def test_a_character_counts_from_its_last_byte_on(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.encode("a🙂b", add_special_tokens=False)
    assert len(tokens) == 6
    assert first_stop(stop_strings(tokenizer, ["🙂"]), tokens) == 5


def test_special_tokens_and_unknown_ids_neither_hold_a_string_nor_break_it(tokenizer: PreTrainedTokenizerBase) -> None:
    pad_id, end, unknown = *tokenizer.convert_tokens_to_ids([PAD, END]), len(tokenizer) + 5
    x, y = tokenizer.encode("xy", add_special_tokens=False)
    assert first_stop(stop_strings(tokenizer, ["xy"]), [x, *[pad_id, unknown] * 50, end, y, x]) == 103
    assert first_stop(stop_strings(tokenizer, [PAD, END]), [pad_id, x, end, unknown]) is None


def test_a_space_before_the_first_token_is_seen() -> None:
    """Decoders of this kind drop it where a text begins."""
    words = {word: token for token, word in enumerate(["<end>", "▁a", "▁", "b"])}
    model = Tokenizer(models.WordLevel(words, unk_token="b"))
    model.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
    assert decode_response(tokenizer, [2, 3]) == "b" and decode_response(tokenizer, [1, 2, 3]) == "a b"
    assert first_stop(stop_strings(tokenizer, [" b"]), [1, 1, 1, 2, 3]) == 5


def test_only_the_last_tokens_are_decoded(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def counting(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return decode_response(tokenizer, ids)

    monkeypatch.setattr("rlhf.generation.stopping.decode_response", counting)
    tokens = tokenizer.encode("x" * 100, add_special_tokens=False)
    assert first_stop(stop_strings(tokenizer, ["é", "y"]), tokens) is None
    assert len(decoded) == len(tokens) and max(decoded) == 3


def test_no_strings_are_no_condition_and_an_empty_one_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    assert stop_strings(tokenizer, []) is None
    with pytest.raises(ValueError, match="empty"):
        stop_strings(tokenizer, ["a", ""])
