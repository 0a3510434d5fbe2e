"""Preference pairs that people or models judged: read from a file or the hub, and what of them is left out.

Three forms of `chosen` and `rejected` are known: transcripts, `\\n\\nHuman: ... \\n\\nAssistant: ...` (HH-RLHF, Bai et
al., 2022); lists of messages with role and content (UltraFeedback, Cui et al., 2023); and, beside a column with the
question, the two answers alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.data.gsm8k import question_hash
from rlhf.data.overlap import folded
from rlhf.data.preferences import Pair
from rlhf.data.readers import Placed, read_rows, text_of, value_of
from rlhf.data.sources import load_hub
from rlhf.errors import UserError
from rlhf.params import Preferences, on_hub

Turns = list[tuple[str, str]]
"""A dialogue: who speaks (user, assistant, system) and what they say."""

NAMES = {"user": "Human", "assistant": "Assistant", "system": "System"}
_TURN = re.compile(r"\n\n(Human|Assistant):")
CAUSES = ("different_questions", "empty", "equal", "twice", "contaminated", "cut", "over_max_pairs", "over_questions")
"""Why a pair is left out, in the order in which it is asked; each pair counts once."""


@dataclass(frozen=True)
class Judged:
    """A row of a preference set; `question` is None where its two sides answer different questions."""

    question: str | None
    chosen: str
    rejected: str


def read(settings: Preferences) -> Iterator[Judged]:
    """The pairs of `preferences.source`, lazily; raises UserError that names the row at fault."""
    return (_judged(row, settings) for row in _rows(settings))


def _rows(settings: Preferences) -> Iterable[Placed]:
    match = on_hub(settings.source)
    if match is None:
        if not Path(settings.source).is_file():
            raise UserError(f"preferences.source={settings.source} is no file: name one, or hf://org/name@revision")
        return read_rows(Path(settings.source))
    repo, revision = match
    splits = load_hub(repo, None, revision, "preferences.source", "preferences.source=FILE preferences.reads=FILE")
    if settings.split not in splits:
        there = ", ".join(map(str, splits))
        raise UserError(f"preferences.split={settings.split}: {settings.source} has no such split: it has {there}")
    place = f"preferences.source: {settings.source} {settings.split} row"
    return ((f"{place} {number}", row) for number, row in enumerate(splits[settings.split], start=1))


# Reading one row


def _judged(row: Placed, settings: Preferences) -> Judged:
    columns = settings.columns
    named = text_of(row, columns.question, "preferences.columns.question") if columns.question else None
    chosen, rejected = (
        _sides(row, column, f"preferences.columns.{key}", named)
        for key, column in (("chosen", columns.chosen), ("rejected", columns.rejected))
    )
    return Judged(chosen[0] if chosen[0] == rejected[0] else None, chosen[1].strip(), rejected[1].strip())


def _sides(row: Placed, column: str, key: str, question: str | None) -> tuple[str, str]:
    """The question and the answer of one side; a question that a column gives goes before the dialogue's."""
    value = value_of(row, column, key)
    if isinstance(value, str) and not _TURN.match(value):
        if question is None:
            advice = "name the question's column with preferences.columns.question"
            raise UserError(f"{row[0]}: column {column} is neither transcript nor messages: {advice}")
        return question, value
    place = f"{row[0]}: column {column}"
    turns = _transcript(value) if isinstance(value, str) else _messages(value, place)
    if len(turns) < 2 or turns[-1][0] != "assistant":
        raise UserError(f"{place} must end with an answer by the assistant, after a question")
    return question or dialogue(turns[:-1]), turns[-1][1]


def _transcript(text: str) -> Turns:
    _, *parts = _TURN.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [(roles[name], said.strip()) for name, said in zip(parts[::2], parts[1::2], strict=True)]


def _messages(value: Any, place: str) -> Turns:
    if not isinstance(value, Sequence):
        raise UserError(f"{place} is {type(value).__name__}: write a transcript or a list of messages")
    turns = []
    for message in value:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in NAMES or not isinstance(content, str):
            raise UserError(f"{place} holds a message without role (user, assistant, system) and content")
        turns.append((role, content.strip()))
    return turns


def dialogue(turns: Turns) -> str:
    """What an answer answers: the user's words alone, or all that was said before, a name before each part."""
    if len(turns) == 1 and turns[0][0] == "user":
        return turns[0][1]
    return "\n\n".join(f"{NAMES[role]}: {said}" for role, said in turns)


# Leaving out


def keep(
    judged: Iterable[Judged],
    held_out: Iterable[str],
    fits: Callable[[Pair], bool],
    *,
    max_pairs: int,
    max_questions: int,
) -> tuple[list[Pair], Counter[str]]:
    """The pairs to train on, in their order, and how many were left out by cause.

    `held_out` are the questions of validation, gate and test, which no pair may show, whatever its case, spacing and
    punctuation. `fits` says whether both answers fit the context. Of more than `max_questions` questions those with the
    lowest hashes stay.
    """
    left_out: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
    secret = {folded(question) for question in held_out}
    kept: dict[str, list[Pair]] = {}
    seen: set[Pair] = set()
    for one in judged:
        cause, pair = _cause(one, secret), Pair(one.question or "", one.chosen, one.rejected, "human")
        if cause is None:
            cause = "twice" if pair in seen else None if fits(pair) else "cut"
            seen.add(pair)
        if cause is None and len(kept.get(pair.question, ())) >= max_pairs:
            cause = "over_max_pairs"
        if cause is None:
            kept.setdefault(pair.question, []).append(pair)
        else:
            left_out[cause] += 1
    chosen = set(
        sorted(kept, key=lambda question: (question_hash(question, "preference cap"), question))[:max_questions]
    )
    left_out["over_questions"] = sum(len(pairs) for question, pairs in kept.items() if question not in chosen)
    return [pair for question, pairs in kept.items() if question in chosen for pair in pairs], left_out


def _cause(one: Judged, secret: set[str]) -> str | None:
    if one.question is None:
        return "different_questions"
    if not (one.question.strip() and one.chosen and one.rejected):
        return "empty"
    if one.chosen == one.rejected:
        return "equal"
    parts = [one.question, *(said for _, said in _transcript(f"\n\n{one.question}"))]
    return "contaminated" if any(folded(part) in secret for part in parts) else None
