"""PPO in several processes does what it does in one: the same experience, gradient, weights and decisions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlhf.config import compose, validate
from rlhf.data.gsm8k import Problem
from rlhf.distributed import ALONE, Ranks
from rlhf.errors import UsageError
from rlhf.evaluation.accuracy import Graded
from rlhf.models.sharding import whole
from rlhf.ppo import debug, setup, state
from rlhf.ppo.collect import concatenate_rows
from rlhf.ppo.panel import panel_of
from rlhf.ppo.rollout import Experience
from rlhf.ppo.trainer import Progress, train
from rlhf.ppo.update import Learner, UpdateStats, update
from tests.ranks import in_ranks
from tests.rlhf.ppo.toy import (
    Toy,
    same,
    toy_actor_critic,
    toy_demonstrations,
    toy_experience,
    toy_params,
    weights,
)
from tests.tiny_models import VOCABULARY

CRITICS = ["critic=shared", "critic=separate"]
STRATEGIES = ["distributed.strategy=ddp", "distributed.strategy=fsdp"]


class Recorder(Learner):
    """A learner that keeps the gradients of its steps."""

    def step(self, max_grad_norm: float) -> float:
        trained = self.actor_critic.trained_parameters()
        gradients = {name: whole(p.grad).clone() for name, p in trained if p.grad is not None}
        self.gradients: list[dict[str, Tensor]] = [*getattr(self, "gradients", []), gradients]
        return super().step(max_grad_norm)


def updated(
    ranks: Ranks, experience: Experience, *overrides: str, train_policy: bool = True
) -> tuple[Recorder, UpdateStats]:
    """One update on the experience."""
    params = toy_params(*overrides)
    learner = Recorder(toy_actor_critic(params, ranks), params.ppo, ranks)
    ptx = None
    if params.ppo.ptx_coef:
        chosen = [toy_demonstrations()[row % 20] for row in range(len(experience.batch))]
        ptx = setup.pad([d.prompt for d in chosen], [d.response for d in chosen], 0)
    kwargs = {"seed": 0, "iteration": 0, "kl_coef": 0.1, "train_policy": train_policy, "demonstrations": ptx}
    return learner, update(learner, experience, params.ppo, **kwargs)  # type: ignore[arg-type]


def experience(*overrides: str) -> Experience:
    params = toy_params(*overrides)
    return toy_experience(toy_actor_critic(params), params)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def relative_distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    difference = sum(float((tensor - other[name]).square().sum()) for name, tensor in one.items()) ** 0.5
    return difference / sum(float(tensor.square().sum()) for tensor in other.values()) ** 0.5


# --- collecting


def test_rows_of_different_lengths_come_one_below_the_other() -> None:
    one, other = torch.tensor([[[1, 2]]]), torch.tensor([[[3], [4]], [[5], [6]]])
    together = concatenate_rows([one, other], fill=-1)
    assert together.tolist() == [[[1, 2], [-1, -1]], [[3, -1], [4, -1]], [[5, -1], [6, -1]]]
    assert concatenate_rows([torch.tensor([True]), torch.tensor([False])]).tolist() == [True, False]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_iteration_says_the_same_and_advantages_are_whitened_over_all_ranks(
    tmp_path: Path, strategy: str
) -> None:
    """Up to the update all ranks have the same rows: of the prompts, some come twice."""
    seen: list[Experience] = []

    def first_experience(ranks: Ranks) -> tuple[Experience, dict[str, float]]:
        sizes = ("ppo.iterations=1", "ppo.prompts_per_iteration=32", "ppo.sampling.batch_size=5")
        toy = Toy(toy_params(*sizes, "ppo.reward.whiten=true", strategy), ranks=ranks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "rlhf.ppo.trainer.update", lambda learner, seen, *_, **__: found.append(seen) or UpdateStats()
            )
            found = seen[:]
            row = train(toy.loop(), Progress()).rows[-1]
        return found[0], row

    (alone, row), ranked = first_experience(ALONE), in_ranks(tmp_path, first_experience)
    for theirs, their_row in ranked:
        assert theirs.batch.lengths.equal(alone.batch.lengths)
        mask = alone.batch.mask
        assert theirs.batch.tokens[:, 1:][mask].equal(alone.batch.tokens[:, 1:][mask])
        for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns", "weights"):
            torch.testing.assert_close(getattr(theirs, name), getattr(alone, name), rtol=0, atol=1e-6)
        assert their_row == pytest.approx(row, rel=1e-5, abs=1e-6, nan_ok=True)
    assert ranked[0][1] == ranked[1][1]


# --- the update


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize(
    ("train_policy", "more"),
    [
        (True, ["ppo.micro_batch_size=3", "ppo.gradient_checkpointing=true"]),
        (True, ["ppo.ptx_coef=0.5", "ppo.kl.place=loss", "ppo.kl.estimator=ratio_k3", "ppo.entropy_coef=0.01"]),
        (False, []),
    ],
)
def test_the_gradient_is_that_of_one_process(
    tmp_path: Path, strategy: str, critic: str, train_policy: bool, more: list[str]
) -> None:
    assert_same_gradient(tmp_path, strategy, critic, *more, train_policy=train_policy)


def test_the_gradient_of_an_adapter_is_that_of_one_process(tmp_path: Path) -> None:
    assert_same_gradient(tmp_path, STRATEGIES[0], CRITICS[0], "ppo.lora.rank=2", train_policy=True)


def assert_same_gradient(tmp_path: Path, strategy: str, critic: str, *more: str, train_policy: bool) -> None:
    overrides = (strategy, critic, "ppo.epochs=1", "ppo.minibatches=1", *more)
    given = experience(critic)

    def gradient(ranks: Ranks) -> tuple[dict[str, Tensor], UpdateStats]:
        learner, stats = updated(ranks, given, *overrides, train_policy=train_policy)
        return learner.gradients[0], stats

    alone, stats = gradient(ALONE)
    for theirs, their_stats in in_ranks(tmp_path, gradient):
        assert relative_distance(theirs, alone) < 1e-5
        assert their_stats.means() == pytest.approx(stats.means(), rel=1e-5)
        assert (their_stats.tokens, their_stats.steps) == (stats.tokens, stats.steps)
        assert their_stats.grad_norm == pytest.approx(stats.grad_norm, rel=1e-5)
        assert their_stats.ptx_loss == pytest.approx(stats.ptx_loss, rel=1e-5)
    assert any("policy" in name for name in alone) == train_policy


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("critic", CRITICS)
def test_five_steps_lead_to_the_weights_of_one_process(tmp_path: Path, strategy: str, critic: str) -> None:
    overrides = (strategy, critic, "ppo.epochs=5", "ppo.minibatches=1", "ppo.lr=1e-4", "ppo.critic.lr=1e-4")
    given = experience(critic)

    def trained(ranks: Ranks) -> dict[str, Tensor]:
        learner, stats = updated(ranks, given, *overrides)
        assert stats.steps == 5
        return weights(learner)

    alone, before = trained(ALONE), weights(Learner(toy_actor_critic(toy_params(critic)), toy_params(critic).ppo))
    one, other = in_ranks(tmp_path, trained)
    assert same(one, other)
    assert distance(one, alone) < 1e-5
    assert distance(alone, before) > 3e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_target_kl_ends_the_update_on_all_ranks_at_the_same_minibatch(tmp_path: Path, strategy: str) -> None:
    """The approximate KL decides that is the mean over both ranks' rows, not the one of either."""
    given = experience()
    free = (strategy, "ppo.epochs=6", "ppo.minibatches=2", "ppo.lr=2e-3")
    _, unbounded = updated(ALONE, given, *free)
    bounded = (*free, f"ppo.target_kl={unbounded.means()['approx_kl']}")

    def stopped(ranks: Ranks) -> tuple[int, bool]:
        stats = updated(ranks, given, *bounded)[1]
        return stats.steps, stats.stopped

    alone = stopped(ALONE)
    assert alone[1] and 0 < alone[0] < unbounded.steps
    assert in_ranks(tmp_path, stopped) == [alone, alone]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_step_on_all(tmp_path: Path, strategy: str) -> None:
    given = experience()
    rows = len(given.batch)

    def spoilt(ranks: Ranks) -> tuple[int, bool]:
        advantages = given.advantages.clone()
        if ranks.rank == 1:
            advantages[:] = float("nan")
        overrides = (strategy, "ppo.epochs=1", "ppo.minibatches=1")
        before = weights(Learner(toy_actor_critic(toy_params()), toy_params().ppo))
        learner, _ = updated(ranks, given._replace(advantages=advantages), *overrides)
        return learner.bad_steps, same(weights(learner), before)

    assert rows == 16
    assert in_ranks(tmp_path, spoilt) == [(1, True), (1, True)]


# --- validation


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_answers_its_share_of_the_validation(tmp_path: Path, strategy: str) -> None:
    """One word for each: one ends the response, another is the right number. The panel is on every rank."""
    problems = [Problem(f"w{number}", "#### 15", "15", "#### 15", 1, "test") for number in range(3, 10)]
    words = {"15" if token == 15 else f"w{token}": token for token in range(VOCABULARY)}
    speaker = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")), eos_token="w36")
    speaker.chat_template = "{{ messages[-1]['content'] }}"
    params = toy_params(
        "evaluation.batch_size=4", "ppo.sampling.max_new_tokens=1", "verifier.method=flexible", "ppo.panel=5", strategy
    )

    class Scorer:
        def __call__(self, problems: object, texts: list[str], batch: object) -> Tensor:
            asked.append(len(texts))
            return torch.full([len(texts)], 0.7)

    asked: list[int] = []

    def validation(ranks: Ranks) -> tuple[dict[str, float], list[Graded], list[int]]:
        asked.clear()
        validate = setup.validation(problems, speaker, Scorer(), params, ranks)  # type: ignore[arg-type]
        found = validate(toy_actor_critic(params, ranks))
        return found.numbers, list(found.panel), list(asked)

    alone, panel, everything = validation(ALONE)
    assert everything == [7]
    assert alone == pytest.approx({"validation_accuracy": 1 / 7, "validation_score": 0.1})
    assert [row.question for row in panel] == [problems[number].question for number in panel_of(problems, 5)]
    one, other = in_ranks(tmp_path, validation)
    assert one[0] == other[0] == pytest.approx(alone)
    assert one[1] == other[1] == panel
    assert (one[2], other[2]) == ([3], [4])


# --- the whole run


class Killed(Exception):
    """In place of a kill."""


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (2, ("kl=adaptive",)),
        (2, ("critic=separate", "ppo.critic.warmup_iterations=2", "ppo.micro_batch_size=3")),
        (2, ("ppo.lora.rank=2",)),
        (2, ("kl=adaptive", STRATEGIES[1])),
        (3, ("ppo.prompts_per_iteration=6", STRATEGIES[0])),
        (3, ("ppo.prompts_per_iteration=6", STRATEGIES[1])),
    ],
)
def test_processes_killed_and_resumed_equal_those_never_killed(
    tmp_path: Path, size: int, overrides: tuple[str, ...]
) -> None:
    def run(ranks: Ranks, place: Path, kill_at: int | None = None) -> dict[str, Tensor]:
        def kill(row: dict[str, float]) -> None:
            if row["iteration"] == kill_at:
                raise Killed

        saving: Callable[[Learner, Progress], None] = lambda learner, now: state.save(place, learner, now)  # noqa: E731
        toy = Toy(toy_params("ppo.iterations=4", *overrides), save=saving, on_iteration=kill, ranks=ranks)
        ranks.barrier()
        with suppress(Killed):
            train(toy.loop(), state.load(place, toy.learner))
        return weights(toy.learner)

    def never(ranks: Ranks) -> dict[str, Tensor]:
        return run(ranks, tmp_path / "never")

    def killed(ranks: Ranks) -> dict[str, Tensor]:
        return run(ranks, tmp_path / "killed", 2)

    def resumed(ranks: Ranks) -> dict[str, Tensor]:
        return run(ranks, tmp_path / "killed")

    for name in ("never", "killed"):
        (tmp_path / name).mkdir()
    whole = in_ranks(tmp_path / "ranks1", never, size)
    in_ranks(tmp_path / "ranks2", killed, size)
    again = in_ranks(tmp_path / "ranks3", resumed, size)
    assert all(same(found, whole[0]) for found in [*whole, *again])
    states = [(tmp_path / name / state.STATE_FILE).read_bytes() for name in ("never", "killed")]
    assert states[0] == states[1]


def test_processes_must_share_a_minibatch_evenly() -> None:
    sizes = ["ppo.prompts_per_iteration=6", "ppo.samples_per_prompt=1", "ppo.minibatches=2"]
    validate(compose(["scale=smoke", *sizes, "distributed.processes=3"]))
    with pytest.raises(UsageError, match=r"distributed.processes=2 must divide a minibatch's rows.* = 3"):
        validate(compose(["scale=smoke", *sizes, "distributed.processes=2"]))


def test_sharded_models_have_no_adapter() -> None:
    with pytest.raises(UsageError, match=r"distributed.strategy=fsdp trains all weights"):
        toy_params("distributed.strategy=fsdp", "ppo.lora.rank=2")


def test_the_debug_bundle_of_sharded_models_is_whole_and_read_for_one_process(tmp_path: Path) -> None:
    params = toy_params("ppo.iterations=1", "distributed.processes=2", STRATEGIES[1])

    def alarmed(ranks: Ranks) -> dict[str, Tensor]:
        toy = Toy(params, ranks=ranks, scorer=lambda problems, texts, batch: torch.zeros(len(texts)))
        toy.on_alarm = debug.Recorder(tmp_path / "debug", toy.learner, params, "sft")
        before = weights(toy.learner)
        train(toy.loop(), Progress())
        return before

    before = in_ranks(tmp_path, alarmed)[0]
    bundle = debug.read(tmp_path / "debug" / "train_ppo-1-equal_scores")
    assert same(bundle.weights, before)
    assert bundle.params.distributed.processes == 1
