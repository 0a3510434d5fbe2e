"""Best-of-n: the estimator against all subsets, the KL against its definition, the score against PPO's own."""

from __future__ import annotations

from itertools import combinations, permutations
from math import log
from pathlib import Path

import numpy as np
import pytest

from bench import best_of_n
from bench.best_of_n import Answers, expected_best, frontier, kl_of_best, sample_answers, score_answers
from rlhf.config import compose, validate
from rlhf.data.gsm8k import Problem
from rlhf.data.prompts import encode_prompts
from rlhf.generation.engine import Sample
from rlhf.models.checkpoints import load_tokenizer
from tests.policies import save_policy

PARAMS = validate(compose(["scale=tiny", "reward=reward_model", "ppo.sampling.max_new_tokens=6"]))
PROBLEMS = [
    Problem(question=question, answer="#### 4", gold="4", demonstration="#### 4", steps=1, source="test")
    for question in ("Two and two?", "Three and one?", "word " * 400)
]


def over_subsets(scores: list[float], values: list[float], n: int) -> float:
    """The mean over every subset of size n; of several best answers, each counts its share."""
    chosen = []
    for subset in combinations(range(len(scores)), n):
        best = [i for i in subset if scores[i] == max(scores[j] for j in subset)]
        chosen.append(sum(values[i] for i in best) / len(best))
    return sum(chosen) / len(chosen)


@pytest.mark.parametrize(
    "scores",
    [[0.3, -1.0, 2.0, 0.7, 0.1, 5.0], [1.0, 1.0, 0.0, 2.0, 2.0, 2.0], [0.5] * 6],
    ids=["different", "ties", "all equal"],
)
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_the_estimator_is_the_mean_over_all_subsets(scores: list[float], n: int) -> None:
    values = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    found = expected_best(np.array([scores, scores[::-1]]), np.array([values, values]), n)
    assert found == pytest.approx([over_subsets(scores, values, n), over_subsets(scores[::-1], values, n)])


def test_it_does_not_depend_on_the_order_of_equal_scores() -> None:
    found = {
        round(float(expected_best(np.array([[1.0, 1.0, 1.0, 0.0]]), np.array([[*order, 1.0]]), 2)[0]), 12)
        for order in permutations([1.0, 0.0, 0.0])
    }
    # One of the three equals is always taken, and one in three of them is right.
    assert found == {round(1 / 3, 12)}


def test_the_kl_of_best_of_n() -> None:
    """Against its definition, for the answer's rank as a density n u^(n-1) on [0, 1]: the mean of its logarithm."""
    assert kl_of_best(1) == 0
    assert kl_of_best(4) == pytest.approx(log(4) - 0.75)
    places = (np.arange(200_000) + 0.5) / 200_000
    log_density = log(64) + 63 * np.log(places)
    assert kl_of_best(64) == pytest.approx(float((np.exp(log_density) * log_density).mean()), abs=1e-4)


def test_the_curve_by_hand() -> None:
    scores = np.array([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    correct = np.array([[False, False, True, True], [True, False, False, False]])
    one, two, four = frontier(scores, correct)
    assert (one.n, two.n, four.n) == (1, 2, 4)
    assert (one.score, one.accuracy) == (2.5, 0.375)
    # Of six pairs the first question's best is right in five, the second's in three; the mean best is 20/6.
    assert (two.score, two.accuracy) == pytest.approx((20 / 6, (5 / 6 + 3 / 6) / 2))
    assert (four.score, four.accuracy) == (4.0, 1.0)


def test_answers_are_drawn_by_question_and_number(tmp_path: Path) -> None:
    sft = save_policy(tmp_path / "sft")
    answers = sample_answers(sft, PROBLEMS, 3, PARAMS)
    assert [problem.question for problem in answers.problems] == ["Two and two?", "Three and one?"]  # one is too long
    assert answers.correct.shape == (2, 3) and len(answers.samples) == 6
    assert len({tuple(sample.tokens) for sample in answers.samples}) > 2
    fewer = sample_answers(sft, PROBLEMS, 2, PARAMS)
    kept = [answers.samples[row].tokens for row in (0, 1, 3, 4)]
    assert [sample.tokens for sample in fewer.samples] == kept


def test_scores_are_ppos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward model is stood in for by a number a row: clipped, and replaced where the answer was cut off."""
    sft = save_policy(tmp_path / "sft")
    prompts = encode_prompts(load_tokenizer(sft), [problem.question for problem in PROBLEMS[:2]], PARAMS.prompt)
    finished = [True, True, False, True]
    samples = [Sample([number + 1], [0.0], ended) for number, ended in enumerate(finished)]
    answers = Answers(PROBLEMS[:2], [prompt for prompt in prompts if prompt], samples, np.zeros((2, 2), dtype=bool))

    def stand_in(reward_model: Path, params: object) -> object:
        return lambda problems, texts, batch: batch.tokens.gather(1, batch.lengths[:, None] - 1)[:, 0].float() * 2 - 1

    monkeypatch.setattr(best_of_n, "reward_model_scorer", stand_in)
    monkeypatch.setattr(best_of_n, "QUESTIONS_AT_ONCE", 1)
    scores = score_answers(sft, answers, PARAMS)
    cut_off = PARAMS.ppo.reward.cut_off_score
    assert scores.tolist() == [[1.0, 3.0], [cut_off, 5.0]]  # the last would be 7
