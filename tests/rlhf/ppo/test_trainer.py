"""The loop at toy size: it learns, selects, and depends on nothing that it should not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rlhf.errors import UserError
from rlhf.models.actor_critic import ActorCritic
from rlhf.models.lora import add_adapter
from rlhf.ppo.panel import Validation
from rlhf.ppo.trainer import Progress, lr_share, train
from rlhf.ppo.update import Learner
from tests.rlhf.ppo.toy import Toy, low_tokens, same, toy_params, weights
from tests.tiny_models import tiny_model


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


def test_an_adapter_learns_on_a_base_that_stays() -> None:
    """The base is wide: with frozen embeddings, their width is the limit of how sure the policy can be."""
    toy = Toy(toy_params("ppo.iterations=12", "ppo.epochs=2", "ppo.eval_every=100", "ppo.lora.rank=4"))
    policy = tiny_model(spread=8.0)
    base = {name: weight.clone() for name, weight in policy.state_dict().items()}
    add_adapter(policy, toy.params.ppo.lora, toy.params.seed)
    toy.learner = Learner(ActorCritic(policy, None, torch.float32), toy.params.ppo)
    rows = train(toy.loop(), Progress()).rows
    scores = [row["score"] for row in rows[1:]]
    assert sum(scores[:2]) / 2 < 0.2
    assert sum(scores[-2:]) / 2 > 0.5
    assert rows[1]["kl_token"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl_sequence"] > 0.5
    assert all(row["mismatch"] < 1e-5 and row["first_log_ratio"] < 1e-4 for row in rows[1:])
    assert same(
        base, {name.replace(".base_layer", ""): w for name, w in policy.state_dict().items() if "lora_" not in name}
    )


def test_the_same_seed_gives_the_same_weights_and_rows_and_another_seed_others() -> None:
    one, again = Toy(toy_params()), Toy(toy_params())
    rows = train(one.loop(), Progress()).rows
    torch.manual_seed(99)  # the global generator must not matter
    assert train(again.loop(), Progress()).rows == rows
    assert same(weights(one.learner), weights(again.learner))
    other = Toy(toy_params("seed=1"))
    train(other.loop(), Progress())
    assert not same(weights(one.learner), weights(other.learner))


def test_the_samplers_log_probabilities_serve_as_well_as_the_trainers() -> None:
    """One minibatch a step, so that the first one has every token: its mean |log ratio| is the mismatch."""
    computed, known = (
        Toy(toy_params("ppo.minibatches=1", f"ppo.old_logprobs={name}")) for name in ("trainer", "sampler")
    )
    rows, others = train(computed.loop(), Progress()).rows[1:], train(known.loop(), Progress()).rows[1:]
    assert others[0]["mismatch"] == pytest.approx(rows[0]["mismatch"], rel=1e-2) and rows[0]["mismatch"] > 0
    assert rows[0]["first_log_ratio"] < others[0]["first_log_ratio"] < 1e-4
    for one, other in zip(rows, others, strict=True):
        assert other["score"] == one["score"] and other["kl_token"] == pytest.approx(one["kl_token"], abs=1e-5)
        assert other["explained_variance"] == pytest.approx(one["explained_variance"], abs=1e-3)


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


def test_the_panels_answers_are_kept_at_every_validation() -> None:
    toy = Toy(toy_params("ppo.iterations=5", "ppo.eval_every=2"), validate=validations(0.1, 0.2, 0.3, 0.4))
    kept: list[list[int]] = []
    toy.save = lambda _, progress: kept.append([answer["iteration"] for answer in progress.panel])
    panel = train(toy.loop(), Progress()).panel
    assert [(answer["iteration"], answer["response"]) for answer in panel] == [
        (0, "0.1\nß"),
        (2, "0.2\nß"),
        (4, "0.3\nß"),
        (5, "0.4\nß"),
    ]
    assert panel[0] == {"iteration": 0, "question": "q", "gold": "1", "response": "0.1\nß", "correct": False}
    assert kept == [[0], [0], [0, 2], [0, 2], [0, 2, 4], [0, 2, 4, 5]]  # each saved with its row


def test_the_policy_before_ppo_wins_where_nothing_is_strictly_better() -> None:
    toy = Toy(toy_params(), validate=validations(0.5, 0.5, 0.3, 0.5))
    before = weights(toy.learner)
    progress = train(toy.loop(), Progress())
    assert (progress.best_iteration, progress.best_value) == (0, 0.5)
    assert same(progress.best_weights, before)
    assert not same(weights(toy.learner), before)


def test_the_first_strictly_best_policy_is_kept_with_its_value_head() -> None:
    seen = []

    def remember(actor_critic: ActorCritic) -> float:
        seen.append({name: p.detach().clone() for name, p in actor_critic.named_parameters()})
        return (0.2, 0.6, 0.6, 0.1)[len(seen) - 1]

    progress = train(Toy(toy_params(), validate=remember).loop(), Progress())
    assert (progress.best_iteration, progress.best_value) == (1, 0.6)
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
        for token, sequence in (("kl_token", "kl_sequence"), ("kl_k2", "kl_k2_sequence"), ("kl_k3", "kl_k3_sequence")):
            assert row[sequence] == pytest.approx(row[token] * row["response_length"])
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
    falling = ("ppo.critic.warmup_iterations=1", "ppo.warmup_iterations=1", "ppo.iterations=7")
    linear, cosine = (toy_params(f"ppo.lr_schedule={kind}", *falling).ppo for kind in ("linear", "cosine"))
    assert [lr_share(linear, i) for i in range(7)] == pytest.approx([0, 0.5, 1, 0.775, 0.55, 0.325, 0.1])
    half = 0.9 * (1 + 0.5**0.5) / 2  # at a quarter of the fall
    assert [lr_share(cosine, i) for i in range(7)] == pytest.approx([0, 0.5, 1, 0.1 + half, 0.55, 1 - half, 0.1])
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


def test_selection_by_the_reward_model_looks_at_its_score() -> None:
    toy = Toy(toy_params("reward=reward_model", "ppo.selection=reward_model", "ppo.eval_every=1"))
    scores, accuracies = iter([0.1, 0.7, -0.2, 0.7]), iter([0.5, 0.4, 0.9, 0.6])

    def validate(_: ActorCritic) -> Validation:
        return Validation({"validation_accuracy": next(accuracies), "validation_score": next(scores)})

    loop = replace(toy.loop(), validate=validate)
    progress = train(loop, Progress())
    assert (progress.best_iteration, progress.best_value) == (1, 0.7)
    assert progress.rows[1]["validation_accuracy"] == 0.4


def test_a_kl_over_its_limit_stops_before_the_update_and_leaves_the_last_good_state() -> None:
    saved: list[int] = []
    toy = Toy(toy_params("ppo.kl.limit=1e-3"), save=lambda _, progress: saved.append(progress.iteration))
    kept: dict[int, dict[str, torch.Tensor]] = {}
    toy.on_iteration = lambda row: kept.update({int(row["iteration"]): weights(toy.learner)})
    with pytest.raises(UserError, match=r"iteration 2: the KL of .* ppo\.kl\.limit=0\.001"):
        train(toy.loop(), Progress())
    assert saved == [0, 1]
    assert same(weights(toy.learner), kept[1])


def test_kl_in_the_loss_keeps_the_policy_nearer() -> None:
    run = ("ppo.iterations=6", "ppo.lr=0.003")
    free, held = (train(Toy(toy_params("kl=loss", f"ppo.kl.coef={c}", *run)).loop(), Progress()).rows for c in (0, 20))
    assert held[-1]["kl_k3"] < 0.5 * free[-1]["kl_k3"]
    assert held[1]["explained_variance"] == free[1]["explained_variance"]  # the returns hold no KL


def test_demonstrations_mixed_in_pull_towards_them() -> None:
    plain, mixed = (Toy(toy_params(f"ppo.ptx_coef={coef}", "ppo.iterations=6")) for coef in (0, 5))
    losses = [train(toy.loop(), Progress()).rows for toy in (plain, mixed)]
    assert {row["ptx_loss"] for row in losses[0][1:]} == {0.0}
    assert losses[1][-1]["ptx_loss"] < 0.5 * losses[1][1]["ptx_loss"]
    assert losses[1][-1]["score"] < losses[0][-1]["score"]
