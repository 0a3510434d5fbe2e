"""Debug bundles: when one is kept, what is in it, and that none ever stops training."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf.distributed import Ranks
from rlhf.errors import UserError
from rlhf.ppo import debug, guards
from rlhf.ppo.debug import Case, Recorder
from rlhf.ppo.guards import Alarm
from rlhf.ppo.trainer import Progress, train
from tests.rlhf.ppo.toy import Toy, low_tokens, same, toy_params, weights


class Heard:
    """Notes every alarm, with the weights at that moment."""

    def __init__(self, toy: Toy) -> None:
        self.alarms: list[Alarm] = []
        self.cases: list[Case] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self._toy = toy
        toy.on_alarm = self

    def __call__(self, alarm: Alarm, case: Case) -> None:
        self.alarms.append(alarm)
        self.cases.append(case)
        self.weights.append(weights(self._toy.learner))


def alarmed(*overrides: str, scorer: Callable[..., torch.Tensor] = low_tokens, error: str = "") -> tuple[Toy, Heard]:
    """A toy run with what it told of its alarms; `error` is what it ends with."""
    toy = Toy(toy_params(*overrides), scorer=scorer)
    heard = Heard(toy)
    if error:
        with pytest.raises(Exception, match=error):
            train(toy.loop(), Progress())
    else:
        train(toy.loop(), Progress())
    return toy, heard


def recorder(place: Path, toy: Toy) -> Recorder:
    return Recorder(place, toy.learner, toy.params, "hash of sft")


def equal_scores(problems: object, texts: list[str], batch: object) -> torch.Tensor:
    return torch.ones(len(texts))


# --- what the loop tells


def test_a_healthy_run_tells_of_nothing() -> None:
    assert alarmed()[1].alarms == []


def test_a_warning_is_told_before_the_update_with_what_the_update_will_see() -> None:
    start = weights(Toy(toy_params()).learner)
    _, heard = alarmed("ppo.reward.cut_off_score=1", "ppo.iterations=1", scorer=equal_scores)
    assert [alarm.name for alarm in heard.alarms] == ["equal_scores"]
    assert same(heard.weights[0], start)
    (case,) = heard.cases
    assert (case.iteration, case.train_policy, case.kl_coef) == (0, True, 0.01)
    assert case.experience.advantages[case.experience.batch.mask].mean() == pytest.approx(0, abs=1e-6)
    assert case.row["score_std"] == 0


def test_a_fatal_alarm_is_told_before_it_ends_training() -> None:
    _, heard = alarmed("ppo.kl.limit=1e-3", error="iteration 2: the KL")
    assert [(alarm.name, alarm.fatal) for alarm in heard.alarms] == [("kl", True)]
    assert heard.cases[0].iteration == 1


def test_the_ratio_is_checked_with_the_weights_of_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LOG_RATIO_TOLERANCE", -1.0)
    toy, heard = alarmed("ppo.iterations=1", "ppo.epochs=2")
    assert [alarm.name for alarm in heard.alarms] == ["ratio"]
    assert same(heard.weights[0], weights(Toy(toy_params()).learner))
    assert not same(heard.weights[0], weights(toy.learner))


def test_a_log_ratio_that_is_not_a_number_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    params = toy_params("ppo.iterations=1", "ppo.minibatches=1", "ppo.micro_batch_size=4")

    def corrupt(case: Case) -> None:
        case.experience.logprobs[0][case.experience.batch.mask[0]] = math.nan

    toy = Toy(params)
    heard = Heard(toy)
    rung = guards.of_rollout
    monkeypatch.setattr(guards, "of_rollout", lambda *a: [*rung(*a), Alarm("test", "test")])
    toy.on_alarm = lambda alarm, case: corrupt(case) if alarm.name == "test" else heard(alarm, case)
    train(toy.loop(), Progress())
    assert [alarm.name for alarm in heard.alarms] == ["ratio"]
    assert math.isnan(heard.cases[0].row["first_log_ratio"])


def test_three_gradients_that_are_not_finite_are_told_of() -> None:
    def poison(problems: object, texts: list[str], batch: object) -> torch.Tensor:
        return torch.full((len(texts),), math.nan)

    _, heard = alarmed("ppo.epochs=3", "ppo.reward.cut_off_score=0", scorer=poison, error="3 times in a row")
    last = heard.alarms[-1]
    assert (last.name, last.fatal) == ("gradient", True)
    assert "lower ppo.lr" in last.text
    assert heard.cases[-1].row["steps"] == 2


def test_an_unexpected_error_is_told_of_and_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise IndexError("no such row")

    monkeypatch.setattr("rlhf.ppo.update.policy_losses", broken)
    _, heard = alarmed(error="no such row")
    assert [(alarm.name, alarm.text) for alarm in heard.alarms] == [("error", "no such row")]


# --- what is kept


@pytest.fixture
def case(capsys: pytest.CaptureFixture[str]) -> tuple[Toy, Case]:
    """A run that ended, and why: it was its third iteration, as far as the tests know."""
    toy, heard = alarmed("ppo.kl.limit=1e-3", "ppo.ptx_coef=0.1", error="the KL")
    capsys.readouterr()
    return toy, replace(heard.cases[0], iteration=2)


def test_what_is_written_is_read_back(case: tuple[Toy, Case], tmp_path: Path) -> None:
    toy, one = case
    one.row["accuracy"] = math.nan
    debug.write(tmp_path / "bundle", Alarm("kl", "too far", True), one, weights(toy.learner), toy.params, "hash of sft")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    bundle = debug.read(tmp_path / "bundle")
    assert bundle.alarm == Alarm("kl", "too far", True)
    assert (bundle.iteration, bundle.kl_coef, bundle.train_policy, bundle.sft) == (2, 0.01, True, "hash of sft")
    assert math.isnan(bundle.row.pop("accuracy")) and math.isnan(one.row.pop("accuracy"))
    assert bundle.row == one.row
    assert bundle.params == toy.params
    assert bundle.versions["torch"] == torch.__version__
    assert same(bundle.weights, weights(toy.learner))
    for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns", "weights"):
        assert getattr(bundle.experience, name).equal(getattr(one.experience, name)), name
    assert bundle.experience.kept is None
    assert bundle.scores.equal(one.scores) and bundle.finished.equal(one.rollout.finished)
    pairs = [(bundle.experience.batch, one.experience.batch), (bundle.demonstrations, one.demonstrations)]
    for read, written in pairs:
        assert same(vars(read), vars(written))
    assert debug.read(tmp_path / "bundle", ["ppo.lr=0.5"]).params.ppo.lr == 0.5


def test_kept_tokens_are_among_it(case: tuple[Toy, Case], tmp_path: Path) -> None:
    toy, one = case
    kept = torch.arange(12).view(1, 3, 4)
    one = replace(one, experience=one.experience._replace(kept=kept))
    debug.write(tmp_path / "bundle", Alarm("kl", ""), one, weights(toy.learner), toy.params, "")
    assert debug.read(tmp_path / "bundle").experience.kept.equal(kept)  # type: ignore[union-attr]


def test_each_alarm_is_kept_once_a_run(
    case: tuple[Toy, Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy, one = case
    keep = recorder(tmp_path, toy)
    for name in ("kl", "kl", "ratio"):
        keep(Alarm(name, ""), one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train_ppo-3-kl", "train_ppo-3-ratio"]
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"train_ppo: replay it with python -m rlhf.ppo.replay {tmp_path}/train_ppo-3-{name}" for name in ("kl", "ratio")
    ]


def test_the_first_rank_alone_keeps_one(case: tuple[Toy, Case], tmp_path: Path) -> None:
    toy, one = case
    toy.learner.ranks = Ranks(rank=1, size=2)
    recorder(tmp_path, toy)(Alarm("kl", ""), one)
    assert list(tmp_path.iterdir()) == []


def test_another_run_replaces_the_bundle_of_the_same_name(case: tuple[Toy, Case], tmp_path: Path) -> None:
    toy, one = case
    for text in ("first", "second"):
        recorder(tmp_path, toy)(Alarm("kl", text), one)
    assert debug.read(tmp_path / "train_ppo-3-kl").alarm.text == "second"


def test_the_newest_ones_are_kept(case: tuple[Toy, Case], tmp_path: Path) -> None:
    toy, one = case
    keep = recorder(tmp_path, toy)
    for number, name in enumerate("cebdfa"):
        keep(Alarm(name, ""), one)
        os.utime(tmp_path / f"train_ppo-3-{name}", (number, number))
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == sorted("bdfa")


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_bundle_that_cannot_be_kept_is_said_and_stops_nothing(
    case: tuple[Toy, Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    toy, one = case
    if fault == "full":
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr(debug.shutil, "disk_usage", lambda _: usage)
    else:
        (tmp_path / "debug").write_text("in the way")
    recorder(tmp_path / "debug", toy)(Alarm("kl", ""), one)
    assert "train_ppo-3-kl: no debug bundle: " in capsys.readouterr().out
    assert not list(tmp_path.glob("debug/*"))


def test_a_directory_that_is_no_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"batch\.safetensors is missing: name a directory of runs/debug/"):
        debug.read(tmp_path)
