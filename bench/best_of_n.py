"""Best-of-n: of n answers that the SFT policy samples, the one with the highest reward-model score is given.

What it reaches is estimated from N answers a question, over all their subsets of size n (Nakano et al., 2021, WebGPT;
Gao et al., 2023, Scaling laws for reward model overoptimization).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf.data.answers import is_correct
from rlhf.data.gsm8k import Problem
from rlhf.data.prompts import decode_response, encode_prompts
from rlhf.generation.engine import Sample
from rlhf.generation.responses import sample_responses
from rlhf.models.actor_critic import sampling_copy
from rlhf.models.batches import pad
from rlhf.models.checkpoints import load_policy, load_tokenizer
from rlhf.params import Params
from rlhf.ppo.rewards import task_scores
from rlhf.ppo.setup import reward_model_scorer
from rlhf.runtime import device, matmul_dtype, progress
from rlhf.streams import Purpose, token_uniforms

QUESTIONS_AT_ONCE = 32


class Answers(NamedTuple):
    """N sampled answers to each of the questions whose prompt fits.

    Attributes:
        problems, prompts: the questions, Q of them, and their prompts' tokens.
        samples: Q times N answers, a question's own beside each other.
        correct: (Q, N) whether the verifier finds the answer right.
    """

    problems: list[Problem]
    prompts: list[list[int]]
    samples: list[Sample]
    correct: NDArray[np.bool_]


class Best(NamedTuple):
    """What the best of n is worth: expected reward-model score, true accuracy, and KL to the policy, in nats."""

    n: int
    kl: float
    score: float
    accuracy: float


def kl_of_best(n: int) -> float:
    """KL of best-of-n from the policy that it samples, in nats an answer: log n - (n-1)/n (Gao et al., 2023).

    That is an upper bound where an answer can come twice or two can score the same (Beirami et al., 2024, Theoretical
    guarantees on the alignment policy of best-of-n).
    """
    return math.log(n) - (n - 1) / n


def expected_best(scores: NDArray[np.float64], values: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """(Q,) the expected value of the answer with the highest score among n of a question's N; scores, values (Q, N).

    The mean over all subsets of size n, thus unbiased: the answer ranked i from below (1 to N) is the best in
    C(i-1, n-1) of the C(N, n) subsets. Among equal scores each is as likely to be taken.
    """
    total = scores.shape[1]
    weights = np.array([math.comb(below, n - 1) / math.comb(total, n) for below in range(total)])
    return np.array([_in_order(*row) @ weights for row in zip(scores, values, strict=True)])


def _in_order(scores: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values in the order of their scores, each the mean over the values whose score is the same."""
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    means = np.bincount(group, weights=values) / sizes
    return np.repeat(means, sizes)


def frontier(scores: NDArray[np.float64], correct: NDArray[np.bool_]) -> Iterator[Best]:
    """Best-of-n for n = 1, 2, 4, ... up to the N answers of each question; scores and correct are (Q, N)."""
    right = correct.astype(np.float64)
    for n in (2**power for power in range(scores.shape[1].bit_length())):
        score, accuracy = (float(expected_best(scores, of, n).mean()) for of in (scores, right))
        yield Best(n, kl_of_best(n), score, accuracy)


def sample_answers(sft: Path, problems: Sequence[Problem], count: int, params: Params) -> Answers:
    """`count` answers of the SFT policy to each problem, at PPO's sampling settings."""
    settings, tokenizer = params.ppo.sampling, load_tokenizer(sft)
    model = sampling_copy(load_policy(sft).to(device(params.runtime)), matmul_dtype(params.runtime))
    encoded = encode_prompts(tokenizer, [problem.question for problem in problems], params.prompt)
    numbers = [number for number, prompt in enumerate(encoded) if prompt is not None]
    chosen, prompts = [problems[number] for number in numbers], [prompt for prompt in encoded if prompt is not None]
    rows = np.repeat(numbers, count)
    with progress("best-of-n", len(rows)) as bar:
        samples = sample_responses(
            model,
            tokenizer,
            [prompt for prompt in prompts for _ in range(count)],
            token_uniforms(
                params.seed, Purpose.EVALUATION, 0, rows, np.arange(len(rows)) % count, settings.max_new_tokens
            ),
            temperature=settings.temperature,
            batch_size=settings.batch_size,
            top_k=settings.top_k,
            top_p=settings.top_p,
            stop=settings.stop,
            on_rows=bar.advance,
        )
    asked = [problem for problem in chosen for _ in range(count)]
    correct = [
        is_correct(decode_response(tokenizer, sample.tokens), problem.gold, params.verifier.method)
        for problem, sample in zip(asked, samples, strict=True)
    ]
    return Answers(chosen, prompts, samples, np.array(correct).reshape(len(chosen), count))


def score_answers(reward_model: Path, answers: Answers, params: Params) -> NDArray[np.float64]:
    """(Q, N) the score that PPO would give each answer: normalised, clipped, `cut_off_score` where it was cut off."""
    scorer, tokenizer = reward_model_scorer(reward_model, params), load_tokenizer(reward_model)
    count = answers.correct.shape[1]
    parts = []
    for start in range(0, len(answers.problems), QUESTIONS_AT_ONCE):
        questions = slice(start, start + QUESTIONS_AT_ONCE)
        asked = [problem for problem in answers.problems[questions] for _ in range(count)]
        prompts = [prompt for prompt in answers.prompts[questions] for _ in range(count)]
        samples = answers.samples[start * count : start * count + len(asked)]
        batch = pad(prompts, [sample.tokens for sample in samples], tokenizer.eos_token_id).to(device(params.runtime))
        texts = [decode_response(tokenizer, sample.tokens) for sample in samples]
        finished = torch.tensor([sample.finished for sample in samples], device=batch.tokens.device)
        parts.append(task_scores(scorer(asked, texts, batch), finished, params.ppo.reward).cpu())
    return torch.cat(parts).double().numpy().reshape(answers.correct.shape)
