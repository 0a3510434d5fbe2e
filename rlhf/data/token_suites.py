"""What data must fulfil once the tokenizer is known: `prompts` after tokenisation, and `preferences`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlhf.data.expectations import Suite
from rlhf.data.gsm8k import SPLITS
from rlhf.data.overlap import folded
from rlhf.data.preferences import Pair
from rlhf.data.prompts import render_prompt, sequence_length
from rlhf.data.suites import frame, numbered, text
from rlhf.params import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOO_LONG = 0.1
"""Share of prompts that may be too long: training leaves them out, evaluation counts them as wrong."""


def tokenised(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    context: int,
    max_new_tokens: int,
    questions: Mapping[str, Sequence[str]],
    sides: Mapping[str, Sequence[Pair]],
) -> list[Suite]:
    """The suites of the four splits' questions, and of the train and the validation pairs."""
    longest = min(prompt.max_tokens, context - max_new_tokens)
    held_out = {folded(question) for split in SPLITS[1:] for question in questions[split]}
    suites = [
        prompts(split, texts, [len(render_prompt(tokenizer, question, prompt)) for question in texts], longest)
        for split, texts in questions.items()
    ]
    for side, pairs in sides.items():
        tokens = [sequence_length(tokenizer, pair.question, (pair.chosen, pair.rejected), prompt) for pair in pairs]
        others = {pair.question for other, them in sides.items() if other != side for pair in them}
        suites.append(preferences(side, pairs, tokens, context, held_out, others))
    return suites


def prompts(split: str, questions: Sequence[str], tokens: Sequence[int], longest: int) -> Suite:
    """Prompts after tokenisation; `longest` is what prompt.max_tokens and the context window allow, in tokens."""
    import great_expectations.expectations.core as gxe

    check = gxe.ExpectColumnValuesToBeBetween(
        column="tokens",
        max_value=longest,
        mostly=1 - MAX_TOO_LONG,
        notes=f"at most {MAX_TOO_LONG:.0%} of the prompts are longer than {longest} tokens",
    )
    advice = "raise prompt.max_tokens as far as the checkpoint's context window goes"
    return Suite("prompts", split, frame(tokens=list(tokens)), [check], numbered(questions), advice)


def preferences(
    side: str, pairs: Sequence[Pair], tokens: Sequence[int], context: int, held_out: set[str], others: set[str]
) -> Suite:
    """Preference pairs.

    Args:
        tokens: of the prompt and the longer of both answers.
        context: the checkpoint's context window, in tokens.
        held_out: the questions of validation, gate and test, folded.
        others: the questions of the other side, train or validation.
    """
    import great_expectations.expectations.core as gxe

    table = frame(
        question=[text(pair.question) for pair in pairs],
        chosen=[text(pair.chosen) for pair in pairs],
        equal=[pair.chosen == pair.rejected for pair in pairs],
        pair=[repr((pair.question, pair.chosen, pair.rejected)) for pair in pairs],
        tokens=list(tokens),
        held_out=[folded(pair.question) in held_out for pair in pairs],
        other_side=[pair.question in others for pair in pairs],
    )
    never = {"value_set": [False]}
    other = "validation" if side == "train" else "train"
    checks = [
        gxe.ExpectColumnValuesToNotBeNull(column="question", notes="question is not empty"),
        gxe.ExpectColumnValuesToNotBeNull(column="chosen", notes="chosen is not empty"),
        gxe.ExpectColumnValuesToBeInSet(column="equal", notes="chosen and rejected differ", **never),
        gxe.ExpectColumnValuesToBeUnique(column="pair", notes="no pair comes twice"),
        gxe.ExpectColumnValuesToBeBetween(
            column="tokens", max_value=context, notes=f"question and answers fit the context of {context} tokens"
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="held_out", notes="the question is not in validation, gate, test", **never
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="other_side", notes=f"the question is not in the {other} pairs", **never
        ),
    ]
    return Suite("preferences", side, table, checks, numbered([pair.question for pair in pairs]))
