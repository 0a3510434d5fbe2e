"""Answering questions as the registered policy does: the text, its final answer, and the vote of several samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from rlhf.data.answers import canonical, extract_answer
from rlhf.data.prompts import decode_response, encode_prompts, is_text
from rlhf.data.votes import majority
from rlhf.errors import UserError
from rlhf.generation.engine import Sample
from rlhf.generation.responses import sample_responses
from rlhf.models.checkpoints import load_policy, load_tokenizer, read_manifest
from rlhf.params import Prompt, Verifier
from rlhf.streams import Purpose, token_uniforms

ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Settings:
    """How questions are answered; raises UserError for settings that make no sense.

    Attributes:
        max_new_tokens: the longest answer in tokens.
        samples: answers a question, of which the majority decides.
        temperature: of the sampling; 0 is greedy.
        seed: the same seed, question and settings give the same answer, whatever else is asked.
    """

    max_new_tokens: int
    samples: int = 1
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens}: ask for at least 1")
        if self.samples < 1:
            raise UserError(f"samples={self.samples}: ask for at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature}: take 0 for greedy answers, or a number above")
        if self.samples > 1 and self.temperature == 0:
            raise UserError(f"samples={self.samples} at temperature=0 are all the same: set a temperature, say 0.7")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed}: take a whole number from 0 to {2**32 - 1}")


@dataclass(frozen=True)
class Response:
    """One sampled answer: its text, the final number in canonical text if one was read, and whether it ended itself."""

    text: str
    answer: str | None
    finished: bool


@dataclass(frozen=True)
class Answer:
    """What the policy says to a question: the first of the responses that the majority agrees with, and all of them.

    Attributes:
        response: the first response with the majority's final number; the first of all where none has a number.
        votes: how many responses have that number.
        responses: every response in the order of sampling.
    """

    response: Response
    votes: int
    responses: list[Response]


class AnsweringPolicy:
    """A policy's checkpoint, ready to answer on the GPU if there is one."""

    def __init__(self, directory: Path) -> None:
        """Loads the checkpoint in `directory`; raises UserError where it is not what its manifest says."""
        manifest = read_manifest(directory)
        self._model = load_policy(directory).to("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = load_tokenizer(directory)
        self._prompt = Prompt.model_validate(manifest.prompt)
        # A checkpoint that PPO did not train names neither.
        self._method = Verifier.model_validate(manifest.params.get("verifier", {"method": "strict"})).method
        self._stop: list[str] = manifest.params.get("ppo", {}).get("sampling", {}).get("stop", [])

    def answer(self, questions: Sequence[str], settings: Settings) -> list[Answer]:
        """One answer a question, in their order.

        Raises UserError for an empty question, one that is no text or longer than the policy was trained on, or an
        answer that could leave the model's context.
        """
        prompts = [prompt for prompt in self._prompts(questions) for _ in range(settings.samples)]
        numbers = [int.from_bytes(sha256(question.encode()).digest()[:4]) for question in questions]
        uniforms = token_uniforms(
            settings.seed,
            Purpose.SERVING,
            0,
            [number for number in numbers for _ in range(settings.samples)],
            [*range(settings.samples)] * len(questions),
            settings.max_new_tokens,
        )
        with torch.inference_mode():
            samples = sample_responses(
                self._model,
                self._tokenizer,
                prompts,
                uniforms,
                temperature=settings.temperature,
                batch_size=ROWS_AT_ONCE,
                stop=self._stop,
            )
        responses = [self._response(sample) for sample in samples]
        starts = range(0, len(responses), settings.samples)
        return [vote(responses[start : start + settings.samples]) for start in starts]

    def _prompts(self, questions: Sequence[str]) -> list[list[int]]:
        if not all(question.strip() for question in questions):
            raise UserError("the question is empty: ask something")
        if not all(map(is_text, questions)):
            raise UserError("the question is no text: write it in UTF-8")
        fitting = []
        for prompt in encode_prompts(self._tokenizer, questions, self._prompt):
            if prompt is None:
                raise UserError(f"the question is too long: this policy reads at most {self._prompt.max_tokens} tokens")
            fitting.append(prompt)
        return fitting

    def _response(self, sample: Sample) -> Response:
        text = decode_response(self._tokenizer, sample.tokens)
        number = extract_answer(text, self._method)
        return Response(text, None if number is None else canonical(number), sample.finished)


def vote(responses: list[Response]) -> Answer:
    """The answer that the responses to one question, at least one, make by majority."""
    answers = [response.answer for response in responses]
    winner = majority(answers)
    return Answer(responses[answers.index(winner)], 0 if winner is None else answers.count(winner), responses)
