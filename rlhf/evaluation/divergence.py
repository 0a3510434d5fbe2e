"""How far the policy has moved from its SFT start, state by state along its own answers.

In each state, KL(policy || SFT) of the next token is summed over the whole vocabulary: exact, not an estimate from the
token that was written. Nothing of the size of all tokens times the vocabulary ever exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.evaluation.accuracy import Graded
from rlhf.evaluation.statistics import DECIMALS
from rlhf.models.actor_critic import final_hidden
from rlhf.models.batches import TokenBatch, pad
from rlhf.models.token_logprobs import CHUNK, output_logits

TOKENS, PLACES, ALTERNATIVES = 10, 4, 3
BEFORE, AFTER = 40, 8
"""Tokens of the answer shown around a place."""


@dataclass(frozen=True)
class TokenKl:
    """What the states in which the policy wrote one token have of the KL."""

    text: str
    count: int
    mean: float
    """Nats a state."""
    share: float
    """Of the KL of all states."""


@dataclass(frozen=True)
class Place:
    """One state: the answer around the token that the policy wrote there, and what both models would rather write."""

    question: str
    before: str
    token: str
    after: str
    kl: float
    sft: list[tuple[str, float]]
    """The most likely tokens with their probabilities."""
    policy: list[tuple[str, float]]


@dataclass(frozen=True)
class Divergence:
    """What the report says of the KL: nats an answer and a state, and where most of it lies."""

    sequence: float
    token: float
    tokens: list[TokenKl]
    places: list[Place]


@dataclass(frozen=True)
class Pair:
    """Policy and SFT model with how they are computed: `dtype` of matrix products, the sampling `temperature`."""

    policy: PreTrainedModel
    sft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    temperature: float
    dtype: torch.dtype


@torch.no_grad()
def state_kls(
    pair: Pair, answers: Sequence[Graded], micro_batch_size: int, on_rows: Callable[[int], None] | None = None
) -> list[list[float]]:
    """KL(policy || SFT) in nats in the state before each token of each answer; none where the prompt was too long.

    `on_rows(n)` is called as answers get done and adds up to `len(answers)`.
    """
    found: list[list[float]] = [[] for _ in answers]
    answered = sorted((row for row, a in enumerate(answers) if a.tokens), key=lambda row: _length(answers[row]))
    if on_rows and len(answered) < len(answers):
        on_rows(len(answers) - len(answered))
    for start in range(0, len(answered), micro_batch_size):
        rows = answered[start : start + micro_batch_size]
        batch = pad([answers[row].prompt for row in rows], [answers[row].tokens for row in rows], 0)
        kls = _batch_kls(pair, batch.to(pair.policy.device)).split([answers[row].length for row in rows])
        for row, states in zip(rows, kls, strict=True):
            found[row] = states.tolist()
        if on_rows:
            on_rows(len(rows))
    return found


def summarise(pair: Pair, answers: Sequence[Graded], kls: Sequence[Sequence[float]]) -> Divergence:
    """What the report says, of what `state_kls` found; means are 0 without any answer."""
    answered = [values for values in kls if values]
    return Divergence(
        sequence=round(fmean(map(sum, answered)), DECIMALS) if answered else 0.0,
        token=round(fmean(kl for values in answered for kl in values), DECIMALS) if answered else 0.0,
        tokens=tokens_with_most_kl(pair.tokenizer, answers, kls),
        places=places_with_most_kl(pair, answers, kls),
    )


def next_token_kl(
    policy: PreTrainedModel,
    sft: PreTrainedModel,
    policy_hidden: Tensor,
    sft_hidden: Tensor,
    temperature: float,
    chunk: int = CHUNK // 2,
) -> Tensor:
    """Float32 (N,) KL(policy || SFT) of the next token, from both models' final hidden states (N, D).

    `chunk` rows have both models' logits at once.
    """
    pieces = []
    for ours, theirs in zip(policy_hidden.split(chunk), sft_hidden.split(chunk), strict=True):
        logprobs = torch.log_softmax(output_logits(policy, ours) / temperature, dim=-1)
        excess = logprobs - torch.log_softmax(output_logits(sft, theirs) / temperature, dim=-1)
        pieces.append((logprobs.exp() * excess).sum(dim=-1))
    return torch.cat(pieces)


def tokens_with_most_kl(
    tokenizer: PreTrainedTokenizerBase, answers: Sequence[Graded], kls: Sequence[Sequence[float]]
) -> list[TokenKl]:
    """The `TOKENS` tokens in whose states most of the KL lies, those with most first; none without any KL."""
    states: dict[int, list[float]] = defaultdict(list)
    for answer, values in zip(answers, kls, strict=True):
        for token, kl in zip(answer.tokens, values, strict=True):
            states[token].append(kl)
    total = sum(map(sum, kls))
    if not total:
        return []
    most = sorted(states, key=lambda token: (-sum(states[token]), token))[:TOKENS]
    return [
        TokenKl(
            text=_text(tokenizer, [token]),
            count=len(states[token]),
            mean=sum(states[token]) / len(states[token]),
            share=sum(states[token]) / total,
        )
        for token in most
    ]


@torch.no_grad()
def places_with_most_kl(pair: Pair, answers: Sequence[Graded], kls: Sequence[Sequence[float]]) -> list[Place]:
    """The `PLACES` states with most KL, largest first; one for each token that was written there."""
    states = [(kl, row, place) for row, values in enumerate(kls) for place, kl in enumerate(values)]
    chosen: dict[int, tuple[float, int, int]] = {}
    for state in sorted(states, key=lambda state: (-state[0], state[1:])):
        _, row, place = state
        chosen.setdefault(answers[row].tokens[place], state)
        if len(chosen) == PLACES:
            break
    return [_place(pair, answers[row], place, kl) for kl, row, place in chosen.values() if kl > 0]


def _place(pair: Pair, answer: Graded, place: int, kl: float) -> Place:
    written = answer.tokens
    start, end = max(0, place - BEFORE), place + 1 + AFTER
    batch = pad([answer.prompt], [written[: place + 1]], 0).to(pair.policy.device)
    return Place(
        question=answer.question,
        before=("…" if start else "") + _text(pair.tokenizer, written[start:place]),
        token=_text(pair.tokenizer, [written[place]]),
        after=_text(pair.tokenizer, written[place + 1 : end]) + ("…" if end < len(written) else ""),
        kl=kl,
        sft=_most_likely(pair, pair.sft, batch),
        policy=_most_likely(pair, pair.policy, batch),
    )


def _most_likely(pair: Pair, model: PreTrainedModel, batch: TokenBatch) -> list[tuple[str, float]]:
    """The tokens that `model` finds most likely in the state before the last token of the one row."""
    with torch.autocast(batch.tokens.device.type, dtype=pair.dtype, enabled=pair.dtype != torch.float32):
        logits = output_logits(model, final_hidden(model, batch, pair.dtype)[0, -2])
    probabilities, tokens = torch.softmax(logits / pair.temperature, dim=-1).topk(ALTERNATIVES)
    return [
        (_text(pair.tokenizer, [token]), probability)
        for token, probability in zip(tokens.tolist(), probabilities.tolist(), strict=True)
    ]


def _batch_kls(pair: Pair, batch: TokenBatch) -> Tensor:
    """(N,) KL in all states of the batch, row after row."""
    policy, sft = (final_hidden(model, batch, pair.dtype)[:, :-1][batch.mask] for model in (pair.policy, pair.sft))
    with torch.autocast(policy.device.type, dtype=pair.dtype, enabled=pair.dtype != torch.float32):
        return next_token_kl(pair.policy, pair.sft, policy, sft, pair.temperature)


def _length(answer: Graded) -> int:
    return len(answer.prompt) + answer.length


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """The text of tokens, special ones included."""
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
