"""The loop at toy size: it learns, selects, and depends on nothing that it should not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rlhf.models.actor_critic import ActorCritic
from rlhf.ppo.trainer import Progress, _warn, lr_share, train
from rlhf.ppo.update import UpdateStats
from tests.rlhf.ppo.toy import Toy, low_tokens, same, toy_params, weights


def validations(*accuracies: float) -> Callable[[ActorCritic], float]:
    """Gives one accuracy after the other."""
    left = list(accuracies)
    return lambda _: left.pop(0)


def test_ppo_raises_the_score() -> None:
    toy = Toy(toy_params("ppo.iterations=10", "ppo.epochs=2", "ppo.eval_every=100"))
    rows = train(toy.loop(), Progress()).rows
    scores = [row["score"] for row in rows[1:]]
    assert sum(scores[:2]) / 2 < 0.2
    assert sum(scores[-2:]) / 2 > 0.5
    assert rows[-1]["kl_sequence"] > 0.1


def test_the_same_seed_gives_the_same_weights_and_rows_and_another_seed_others() -> None:
    one, again = Toy(toy_params()), Toy(toy_params())
    rows = train(one.loop(), Progress()).rows
    torch.manual_seed(99)  # the global generator must not matter
    assert train(again.loop(), Progress()).rows == rows
    assert same(weights(one.learner), weights(again.learner))
    other = Toy(toy_params("seed=1"))
    train(other.loop(), Progress())
    assert not same(weights(one.learner), weights(other.learner))


def test_validating_more_often_does_not_change_the_weights() -> None:
    often, seldom = Toy(toy_params("ppo.eval_every=1")), Toy(toy_params("ppo.eval_every=3"))
    for toy in (often, seldom):
        train(toy.loop(), Progress())
    assert same(weights(often.learner), weights(seldom.learner))


@pytest.mark.parametrize(("every", "validated"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (9, [0, 5])])
def test_validates_at_the_start_every_so_often_and_at_the_end(every: int, validated: list[int]) -> None:
    rows = train(Toy(toy_params("ppo.iterations=5", f"ppo.eval_every={every}")).loop(), Progress()).rows
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [int(row["iteration"]) for row in rows if "validation_accuracy" in row] == validated


def test_the_policy_before_ppo_wins_where_nothing_is_strictly_better() -> None:
    toy = Toy(toy_params(), validate=validations(0.5, 0.5, 0.3, 0.5))
    before = weights(toy.learner)
    progress = train(toy.loop(), Progress())
    assert (progress.best_iteration, progress.best_accuracy) == (0, 0.5)
    assert same(progress.best_weights, before)
    assert not same(weights(toy.learner), before)


def test_the_first_strictly_best_policy_is_kept_with_its_value_head() -> None:
    seen = []

    def remember(actor_critic: ActorCritic) -> float:
        seen.append({name: p.detach().clone() for name, p in actor_critic.named_parameters()})
        return (0.2, 0.6, 0.6, 0.1)[len(seen) - 1]

    progress = train(Toy(toy_params(), validate=remember).loop(), Progress())
    assert (progress.best_iteration, progress.best_accuracy) == (1, 0.6)
    assert same(progress.best_weights, seen[1])
    assert any(name.startswith("value_head") for name in progress.best_weights)


def test_an_accuracy_of_zero_is_eligible() -> None:
    progress = train(Toy(toy_params(), validate=lambda _: 0.0).loop(), Progress())
    assert progress.best_iteration == 0 and progress.best_weights


def test_each_row_is_told_and_saved_once() -> None:
    told, saved = [], []
    toy = Toy(
        toy_params(),
        on_iteration=lambda row: told.append(row["iteration"]),
        save=lambda _, progress: saved.append((progress.iteration, len(progress.rows))),
    )
    train(toy.loop(), Progress())
    assert told == [0, 1, 2, 3]
    assert saved == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_rows_hold_what_the_curves_need() -> None:
    rows = train(Toy(toy_params("ppo.eval_every=1")).loop(), Progress()).rows
    wanted = (
        "score accuracy kl_token kl_sequence kl_k2 kl_k3 approx_kl clip_fraction policy_loss value_loss "
        "explained_variance entropy response_length cut_off lr kl_coef mismatch validation_accuracy iteration"
    )
    for row in rows[1:]:
        assert set(wanted.split()) <= row.keys()
        assert all(math.isfinite(value) for value in row.values())
        assert row["kl_sequence"] == pytest.approx(row["kl_token"] * row["response_length"])
        assert row["mismatch"] < 1e-5 and row["first_log_ratio"] < 1e-4
        assert 0 < row["cut_off"] < 1 and 1 <= row["response_length"] <= 8
    assert rows[1]["kl_token"] == pytest.approx(0, abs=1e-6)


def test_the_adaptive_coefficient_follows_the_rows() -> None:
    toy = Toy(toy_params("kl=adaptive", "ppo.kl.coef=0.1", "ppo.kl.target=0.01", "ppo.kl.horizon=100"))
    progress = train(toy.loop(), Progress())
    coef = 0.1
    for row in progress.rows[1:]:
        assert row["kl_coef"] == pytest.approx(coef, rel=1e-12)
        error = min(max(row["kl_sequence"] / 0.01 - 1, -0.2), 0.2)
        coef *= 1 + error * 16 / 100
    assert progress.kl_coef == pytest.approx(coef, rel=1e-12)
    assert coef != 0.1


def test_a_fixed_coefficient_of_zero_still_measures_kl() -> None:
    rows = train(Toy(toy_params("ppo.kl.coef=0")).loop(), Progress()).rows
    assert rows[-1]["kl_coef"] == 0 and rows[-1]["kl_k3"] > 0


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_critics_warm_up_keeps_the_policy_for_its_iterations(critic: str) -> None:
    overrides = (f"critic={critic}", "ppo.critic.warmup_iterations=2", "ppo.eval_every=1")
    seen = []

    def remember(actor_critic: ActorCritic) -> float:
        seen.append({name: p.detach().clone() for name, p in actor_critic.named_parameters()})
        return 0.0

    train(Toy(toy_params(*overrides), validate=remember).loop(), Progress())
    policies = [{name: w for name, w in one.items() if name.startswith("policy.")} for one in seen]
    assert same(policies[0], policies[1]) and same(policies[0], policies[2])
    assert not same(policies[2], policies[3])
    assert not seen[0]["value_head.linear.weight"].equal(seen[1]["value_head.linear.weight"])


def test_the_learning_rate_rises_after_the_critics_warm_up() -> None:
    settings = toy_params("ppo.critic.warmup_iterations=2", "ppo.warmup_iterations=3").ppo
    assert [lr_share(settings, iteration) for iteration in range(8)] == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    plain = toy_params("ppo.warmup_iterations=0").ppo
    assert lr_share(plain, 0) == 1


def test_the_deviation_of_the_last_different_scores_is_remembered() -> None:
    saved: list[float | None] = []

    def scorer(problems, texts, batch):  # type: ignore[no-untyped-def]
        return low_tokens(problems, texts, batch) if len(saved) == 1 else torch.ones(16)

    params = toy_params("ppo.reward.cut_off_score=1")
    toy = Toy(params, scorer=scorer, save=lambda _, progress: saved.append(progress.advantage_std))
    rows = train(toy.loop(), Progress()).rows
    assert [row["score_std"] > 0 for row in rows[1:]] == [True, False, False]
    assert saved[0] is None and saved[1] is not None
    assert saved[2:] == [saved[1], saved[1]]


def test_every_iteration_takes_the_next_prompts() -> None:
    """Eight of 20 prompts an iteration: five iterations are two whole epochs."""
    seen: list[str] = []

    def watching(problems, texts, batch):  # type: ignore[no-untyped-def]
        seen.extend(problem.question for problem in problems)
        return low_tokens(problems, texts, batch)

    train(Toy(toy_params("ppo.iterations=5"), scorer=watching).loop(), Progress())
    assert len(seen) == 80
    assert {seen.count(question) for question in seen} == {4}
    assert len(set(seen[:40])) == 20


HEALTHY = {"score_std": 0.5, "cut_off": 0.0}


@pytest.mark.parametrize(
    ("row", "ratio", "dtype", "told"),
    [
        ({}, 5e-5, torch.float32, ""),
        ({}, 2e-2, torch.bfloat16, ""),
        ({}, 2e-4, torch.float32, "log ratio"),
        ({}, float("nan"), torch.float32, "log ratio"),
        ({"score_std": 0.0}, 0.0, torch.float32, "all scores are equal"),
        ({"cut_off": 1.0}, 0.0, torch.float32, "ppo.sampling.max_new_tokens"),
    ],
)
def test_a_worthless_iteration_is_told(
    row: dict[str, float], ratio: float, dtype: torch.dtype, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _warn(HEALTHY | row, UpdateStats(first_log_ratio=ratio), dtype, 3)
    out = capsys.readouterr().out
    assert told in out
    assert ("iteration 4" in out) == bool(told)
    assert out.count("\n") == bool(told)
