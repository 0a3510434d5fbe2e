"""How alike two texts are, for finding held-out questions among those that a model is trained on."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

N = 8
"""Words in a row that are hardly the same by chance; the length by which GPT-2's authors measured it (2019)."""
_TOKEN = re.compile(r"[0-9]+(?:[.,][0-9]+)*|[^\W0-9_]+|[-+*/=^<>%]")

Gram = tuple[str, ...]


def words(text: str) -> list[str]:
    """Words, numbers and signs of arithmetic, without differences of case, spacing, punctuation and Unicode form."""
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


def folded(text: str) -> str:
    """The text without those differences."""
    return " ".join(words(text))


def grams(text: str) -> Iterator[Gram]:
    """Every N words in a row; none for a shorter text."""
    parts = words(text)
    return (tuple(parts[i : i + N]) for i in range(len(parts) - N + 1))


def all_grams(texts: Iterable[str]) -> set[Gram]:
    """The N-grams of all texts."""
    return {gram for text in texts for gram in grams(text)}


def shared(text: str, seen: set[Gram]) -> float:
    """The share of a text's N-grams that are among `seen`; 0 for a text that is shorter than one."""
    own = list(grams(text))
    return sum(gram in seen for gram in own) / len(own) if own else 0.0
