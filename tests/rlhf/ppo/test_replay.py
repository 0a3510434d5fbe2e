"""A replayed bundle says what the run saw, and names what is wrong."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.errors import run_command
from rlhf.models.checkpoints import Manifest, checkpoint_hash, save_checkpoint
from rlhf.ppo import debug, guards
from rlhf.ppo.debug import Recorder
from rlhf.ppo.replay import main, replay
from rlhf.ppo.trainer import Progress, train
from tests.rlhf.ppo.toy import Toy, tokenizer, toy_params
from tests.tiny_models import tiny_model

ONE_STEP = ("ppo.iterations=2", "ppo.epochs=1", "ppo.minibatches=1", "ppo.micro_batch_size=4")


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's start as a checkpoint."""
    directory = tmp_path_factory.mktemp("models") / "sft"
    manifest = Manifest(kind="sft", source="tiny:", stop_token="w1")
    save_checkpoint(directory, tiny_model(spread=2.0), tokenizer(), manifest)
    return directory


def bundled(place: Path, sft: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[Path, dict[str, float]]:
    """The bundle of a run whose ratio alarm rings at once, and the row of its first iteration."""
    monkeypatch.setattr(guards, "LOG_RATIO_TOLERANCE", -1.0)
    toy = Toy(toy_params(*overrides))
    toy.on_alarm = Recorder(place, toy.learner, toy.params, checkpoint_hash(sft))
    rows = train(toy.loop(), Progress()).rows
    return place / "train_ppo-1-ratio", rows[1]


def corrupt(file: Path, name: str, value: float) -> None:
    """Puts `value` in the place of the first number of a tensor."""
    tensors = load_file(file)
    tensors[name].view(-1)[0] = value
    save_file(tensors, file)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("ppo.ptx_coef=0.5",),
        ("critic=separate",),
        ("kl=loss",),
        ("ppo.critic.warmup_iterations=1",),
        ("ppo.lora.rank=4",),
    ],
)
def test_the_update_that_was_made_is_computed_again(
    tmp_path: Path, sft: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    directory, row = bundled(tmp_path, sft, monkeypatch, *ONE_STEP, *more)
    found = replay(debug.read(directory), sft)
    (one,) = found.minibatches
    assert one.grad_norm == row["grad_norm"] > 0
    assert one.log_ratio == row["first_log_ratio"]
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"):
        assert one.means[name] == row[name], name
    assert {name: (d.largest, d.mean) for name, d in found.differences.items()} == dict.fromkeys(
        ("logprobs", "values", "ref_logprobs"), (0, 0)
    )
    assert found.not_finite == []


def test_every_minibatch_of_every_epoch_is_seen_with_the_same_weights(
    tmp_path: Path, sft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = bundled(
        tmp_path, sft, monkeypatch, "ppo.iterations=1", "ppo.epochs=2", "ppo.minibatches=2", "ppo.target_kl=1e-9"
    )
    found = replay(debug.read(directory), sft)
    assert len(found.minibatches) == 4
    assert all(one.log_ratio < 1e-5 and one.grad_norm > 0 for one in found.minibatches)
    assert sum(one.tokens for one in found.minibatches[:2]) == sum(one.tokens for one in found.minibatches[2:])


def test_a_param_can_be_changed(tmp_path: Path, sft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, row = bundled(tmp_path, sft, monkeypatch, *ONE_STEP)
    found = replay(debug.read(directory, ["ppo.value_coef=5", "ppo.micro_batch_size=2"]), sft)
    assert found.minibatches[0].grad_norm > 1.2 * row["grad_norm"]
    assert found.minibatches[0].means["policy_loss"] == pytest.approx(row["policy_loss"], abs=1e-6)


def test_what_is_not_finite_is_named(tmp_path: Path, sft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = bundled(tmp_path, sft, monkeypatch, *ONE_STEP)
    corrupt(directory / debug.BATCH, "returns", math.nan)
    weight = "policy.model.layers.1.mlp.up_proj.weight"
    corrupt(directory / debug.WEIGHTS, weight, math.inf)
    found = replay(debug.read(directory), sft)
    assert f"weight: {weight} (1 of 384)" in found.not_finite
    assert any(name.startswith("recorded: returns (1 of ") for name in found.not_finite)
    assert any(name.startswith("again: logprobs (") for name in found.not_finite)
    assert any(name.startswith("gradient 1: policy.model.layers.1.") for name in found.not_finite)
    assert math.isnan(found.minibatches[0].grad_norm)


def test_what_differs_is_measured(tmp_path: Path, sft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = bundled(tmp_path, sft, monkeypatch, *ONE_STEP)
    corrupt(directory / debug.WEIGHTS, "value_head.linear.bias", 0.25)
    found = replay(debug.read(directory), sft)
    assert found.differences["values"].largest == pytest.approx(0.25)
    assert found.differences["values"].mean == pytest.approx(0.25)
    assert found.differences["logprobs"].largest == 0


def test_the_command_prints_it(
    tmp_path: Path, sft: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, row = bundled(tmp_path, sft, monkeypatch, *ONE_STEP)
    tensors = load_file(directory / debug.BATCH)
    tensors["ref_logprobs"][7] -= 10  # the row that has run away furthest
    save_file(tensors, directory / debug.BATCH)
    monkeypatch.setenv("COLUMNS", "160")
    main([str(directory)], sft)
    told = capsys.readouterr().out
    assert "iteration 1, alarm ratio: the first minibatch's log ratio is" in told
    assert f"torch {torch.__version__}," in told
    assert f"{row['grad_norm']:.3g}" in told
    assert "not finite: nothing" in told
    rows = told.partition("rows with most KL")[2]
    start, end = int(tensors["prompt_lengths"][7]), int(tensors["lengths"][7])
    words = tokenizer().decode(tensors["tokens"][7, start:end].tolist(), skip_special_tokens=True)
    first = next(line for line in rows.splitlines() if line.strip()[:1].isdigit())
    assert first.split()[0] == "7" and words in first


def test_what_does_not_fit_is_one_line(
    tmp_path: Path, sft: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = bundled(tmp_path, sft, monkeypatch, *ONE_STEP)
    capsys.readouterr()
    other = tmp_path / "other"
    save_checkpoint(other, tiny_model(seed=9), tokenizer(), Manifest(kind="sft", source="tiny:", stop_token="w1"))
    for arguments, checkpoint, code, message in (
        ([], sft, 2, "name a bundle"),
        ([str(tmp_path / "missing")], sft, 1, "batch.safetensors is missing"),
        ([str(directory), "ppo.no=1"], sft, 2, "ppo.no"),
        ([str(directory), "ppo.critic.kind=separate"], sft, 1, "leave ppo.critic and ppo.lora as they were"),
        ([str(directory)], other, 1, "not the checkpoint that the bundle was made with"),
    ):
        assert run_command("replay", partial(main, arguments, checkpoint)) == code
        told = capsys.readouterr()
        assert told.out == "" and told.err.startswith("replay: ") and told.err.count("\n") == 1
        assert message in told.err
