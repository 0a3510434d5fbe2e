"""Where rewards come from and where they land, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rlhf.data.gsm8k import Problem
from rlhf.models.batches import TokenBatch, pad
from rlhf.models.reward_model import Normalisation, from_policy, raw_scores
from rlhf.params import Reward
from rlhf.ppo.rewards import (
    MixtureScorer,
    RewardModelScorer,
    VerifierScorer,
    deviation,
    task_scores,
    token_rewards,
    whiten_scores,
)
from tests.tiny_models import EOS, PAD, random_tokens, tiny_model


def settings(**changes: object) -> Reward:
    values = {
        "source": "verifier",
        "reads": "conf/nothing",
        "verifier_weight": 1.0,
        "reward_model_weight": 0.0,
        "format_bonus": 0.0,
        "cut_off_score": -0.5,
        "clip": 2.0,
        "whiten": False,
    }
    return Reward.model_validate(values | changes)


def problem(gold: str | None = "18") -> Problem:
    return Problem("Question?", "#### 18", gold, "#### 18", 1, "test")


def batch(rows: int) -> TokenBatch:
    return pad([[2]] * rows, [[3]] * rows, PAD)


@pytest.mark.parametrize("pad_id", [PAD, EOS])
def test_the_score_lands_on_the_last_response_action_and_kl_on_all_of_them(pad_id: int) -> None:
    """Rows: prompt 2 with response 5, EOS; prompt 1 with response 6, 7, 8, cut off. Also where the pad token is EOS."""
    rows = pad([[2, 3], [4]], [[5, EOS], [6, 7, 8]], pad_id)
    kl = torch.tensor([[9.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    rewards = token_rewards(torch.tensor([10.0, 20.0]), kl, rows, coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[0.0, -0.1, 9.8], [-0.3, -0.4, 19.5]]))


def test_a_short_row_keeps_its_padding_free_of_rewards() -> None:
    rows = pad([[2], [2]], [[EOS], [5, 6, 7]], EOS)
    rewards = token_rewards(torch.tensor([1.0, 1.0]), torch.ones(2, 3), rows, coef=0.5)
    assert rewards.tolist() == [[0.5, 0, 0], [-0.5, -0.5, 0.5]]


def test_scores_are_clipped_and_cut_off_rows_get_their_own_score() -> None:
    scores = torch.tensor([5.0, -5.0, 1.0, 5.0])
    finished = torch.tensor([True, True, True, False])
    assert task_scores(scores, finished, settings()).tolist() == [2.0, -2.0, 1.0, -0.5]
    assert task_scores(scores, finished, settings(cut_off_score=-7)).tolist()[-1] == -7  # clipping is for scores


def test_whitened_scores_have_deviation_one_and_keep_their_mean() -> None:
    """Mean 2.5, population deviation 1.5."""
    assert whiten_scores(torch.tensor([1.0, 4.0, 1.0, 4.0])).tolist() == pytest.approx([1.5, 3.5, 1.5, 3.5])
    assert whiten_scores(torch.full((3,), 0.7)).equal(torch.full((3,), 0.7))


@pytest.mark.parametrize("rows", [3, 7, 11, 256, 299])
@pytest.mark.parametrize("score", [0.1, 0.7, -0.35])
def test_equal_scores_have_no_deviation_though_their_mean_is_rounded(rows: int, score: float) -> None:
    equal = torch.full((rows,), score)
    assert deviation(equal) == 0
    assert whiten_scores(equal).equal(equal)


def test_the_verifier_gives_one_for_the_right_number_and_a_bonus_for_one_well_formed_answer() -> None:
    texts = ["3 x 6 = 18\n#### 18", "#### 17", "it is 18", "#### 18\n#### 18"]
    scores = VerifierScorer("strict", 0.125)([problem()] * 4, texts, batch(4))
    assert scores.tolist() == [1.125, 0.125, 0.0, 1.0]
    assert scores.dtype == torch.float32


def test_the_verifier_follows_its_method_and_scores_nothing_without_gold() -> None:
    problems, texts = [problem(), problem(None)], ["it is 18", "#### 18"]
    assert VerifierScorer("strict", 0.0)(problems, texts, batch(2)).tolist() == [0, 0]
    assert VerifierScorer("flexible", 0.0)(problems, texts, batch(2)).tolist() == [1, 0]


def test_the_reward_model_is_normalised_and_independent_of_micro_batches() -> None:
    model = from_policy(tiny_model(), PAD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.nn.init.normal_(model.score.weight)
    rows = pad(random_tokens([3, 5, 1]), random_tokens([2, 4, 7], seed=1), PAD)
    raw = raw_scores(model, rows, torch.float32).detach()
    for size in (1, 2, 8):
        scorer = RewardModelScorer(model, Normalisation(mean=0.5, std=2.0), size, torch.float32)
        scores = scorer([problem()] * 3, ["", "", ""], rows)
        torch.testing.assert_close(scores, (raw - 0.5) / 2, atol=1e-5, rtol=1e-5)
        assert not scores.requires_grad


class Constant:
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, problems: Sequence[Problem], texts: Sequence[str], batch: TokenBatch) -> Tensor:
        return torch.full((len(texts),), self.value)


class Forbidden:
    def __call__(self, problems: Sequence[Problem], texts: Sequence[str], batch: TokenBatch) -> Tensor:
        raise AssertionError("a scorer of weight 0 was asked")


def test_a_mixture_weighs_its_scorers_and_leaves_out_those_of_weight_zero() -> None:
    mixture = MixtureScorer([(2.0, Constant(1.0)), (0.5, Constant(-3.0)), (0.0, Forbidden())])
    assert mixture([problem()] * 2, ["", ""], batch(2)).tolist() == [0.5, 0.5]
