"""How many problems a model answers rightly, decoded greedily: for PPO's validation and for the final evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.data.answers import extract_answer, is_correct
from rlhf.data.gsm8k import Problem
from rlhf.data.prompts import decode_response, encode_prompts
from rlhf.errors import UserError
from rlhf.generation.engine import Sample, generate
from rlhf.generation.stopping import stop_strings
from rlhf.params import Params

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Graded:
    """One problem with the model's response and what the verifier says about it."""

    question: str
    gold: str
    response: str
    """Text without end-of-sequence; empty where the prompt was too long."""
    correct: bool
    """Right under `verifier.method`."""
    strict: bool
    """Right under the strict method."""
    flexible: bool
    """Right under the flexible method."""
    parsed: bool
    """`verifier.method` found a number in the response."""
    finished: bool
    """The response ended by itself, not at the length limit."""
    prompt: list[int]
    """Prompt tokens; none where there are too many."""
    tokens: list[int]
    """Response tokens, end-of-sequence included; none where the prompt was too long."""
    too_long: bool
    """The prompt exceeds `prompt.max_tokens`: nothing was decoded, and the problem counts as wrong."""

    @property
    def length(self) -> int:
        """Response tokens, end-of-sequence included."""
        return len(self.tokens)

    @property
    def cut_off(self) -> bool:
        """The length limit ended the response; it is graded like any other."""
        return not self.finished and not self.too_long

    @property
    def parse_failure(self) -> bool:
        """There is a response, and no number was read from it."""
        return not self.parsed and not self.too_long


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    params: Params,
    on_rows: Callable[[int], None] | None = None,
) -> list[Graded]:
    """Greedy responses to `problems`, graded, in their order.

    Decodes on the model's device and in its dtype, with `prompt`, `verifier.method`, `ppo.sampling.max_new_tokens`,
    `ppo.sampling.stop` and `evaluation.batch_size` of `params`. `on_rows(n)` is called as problems get done and adds up
    to `len(problems)`.
    Raises UserError for a problem without a gold answer.
    """
    golds = [_gold(problem) for problem in problems]
    prompts = encode_prompts(tokenizer, [problem.question for problem in problems], params.prompt)
    fitting = [prompt for prompt in prompts if prompt is not None]
    if on_rows and len(fitting) < len(prompts):
        on_rows(len(prompts) - len(fitting))
    samples = iter(
        generate(
            model,
            fitting,
            stop_ids=[tokenizer.eos_token_id],
            pad_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            max_new_tokens=params.ppo.sampling.max_new_tokens,
            batch_size=params.evaluation.batch_size,
            stop=stop_strings(tokenizer, params.ppo.sampling.stop),
            on_rows=on_rows,
            sampler=params.generation.sampler,
        )
    )
    return [
        _too_long(problem.question, gold)
        if prompt is None
        else _graded(problem.question, gold, prompt, next(samples), tokenizer, params)
        for problem, gold, prompt in zip(problems, golds, prompts, strict=True)
    ]


def accuracy(graded: Sequence[Graded]) -> float:
    """The share of problems that are right under `verifier.method`, in [0, 1]."""
    return sum(row.correct for row in graded) / len(graded)


def _gold(problem: Problem) -> str:
    if problem.gold is None:
        raise UserError(
            f"evaluation: no gold answer for the question {problem.question[:60]!r}: "
            "validation, gate and test problems need one"
        )
    return problem.gold


def _too_long(question: str, gold: str) -> Graded:
    return Graded(
        question=question,
        gold=gold,
        response="",
        correct=False,
        strict=False,
        flexible=False,
        parsed=False,
        finished=False,
        prompt=[],
        tokens=[],
        too_long=True,
    )


def _graded(
    question: str, gold: str, prompt: list[int], sample: Sample, tokenizer: PreTrainedTokenizerBase, params: Params
) -> Graded:
    method = params.verifier.method
    response = decode_response(tokenizer, sample.tokens)
    right = {name: is_correct(response, gold, name) for name in ("strict", "flexible")}
    return Graded(
        question=question,
        gold=gold,
        response=response,
        correct=right[method],
        strict=right["strict"],
        flexible=right["flexible"],
        parsed=extract_answer(response, method) is not None,
        finished=sample.finished,
        prompt=prompt,
        tokens=sample.tokens,
        too_long=False,
    )
