"""Training state: killed and resumed equals never killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlhf.errors import UserError
from rlhf.ppo import state
from rlhf.ppo.trainer import Progress, train
from tests.rlhf.ppo.toy import Toy, low_tokens, same, toy_params, weights
from tests.tiny_models import tiny_model

VARIANTS = [
    ("ppo.iterations=4", "kl=adaptive", "ppo.eval_every=2"),
    ("ppo.iterations=4", "critic=separate", "ppo.critic.warmup_iterations=2", "ppo.weight_decay=0.1"),
    ("ppo.iterations=4", "ppo.lora.rank=2", "ppo.eval_every=2"),
]


class Killed(Exception):
    """In place of a kill."""


def toy(directory: Path, *overrides: str, **more: object) -> Toy:
    return Toy(toy_params(*overrides), save=lambda learner, p: state.save(directory, learner, p), **more)  # type: ignore[arg-type]


def resume(directory: Path, *overrides: str) -> tuple[Toy, Progress]:
    fresh = toy(directory, *overrides)
    return fresh, train(fresh.loop(), state.load(directory, fresh.learner))


def assert_equal(one: tuple[Toy, Progress], other: tuple[Toy, Progress]) -> None:
    assert same(weights(one[0].learner), weights(other[0].learner))
    assert same(one[1].best_weights, other[1].best_weights)
    for mine, theirs in zip(one[0].learner.optimisers, other[0].learner.optimisers, strict=True):
        mine_state, their_state = mine.state_dict()["state"], theirs.state_dict()["state"]
        assert mine_state.keys() == their_state.keys()
        assert all(same(mine_state[place], their_state[place]) for place in mine_state)
    plain = [{**vars(progress), "best_weights": None} for progress in (one[1], other[1])]
    assert plain[0] == plain[1]


@pytest.mark.parametrize("overrides", VARIANTS)
@pytest.mark.parametrize("kill_at", [0, 1, 2, 3])
def test_killed_after_an_iteration_and_resumed_equals_never_killed(
    tmp_path: Path, overrides: tuple[str, ...], kill_at: int
) -> None:
    whole = toy(tmp_path, *overrides)
    never = whole, train(whole.loop(), Progress())
    bytes_of_never = (tmp_path / state.STATE_FILE).read_bytes()
    (tmp_path / state.STATE_FILE).unlink()

    def kill(row: dict[str, float]) -> None:
        if row["iteration"] == kill_at:
            raise Killed

    with pytest.raises(Killed):
        train(toy(tmp_path, *overrides, on_iteration=kill).loop(), Progress())
    assert_equal(resume(tmp_path, *overrides), never)
    assert (tmp_path / state.STATE_FILE).read_bytes() == bytes_of_never


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def without_progress(path: Path) -> None:
    save_file({"weight/x": torch.zeros(1)}, path)


def of_another_model(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata, names = file.metadata(), list(file.keys())
    save_file({name: torch.zeros(3) for name in names}, path, metadata=metadata)


@pytest.mark.parametrize("spoil", [truncated, empty, without_progress, of_another_model])
def test_a_broken_or_foreign_state_is_refused_by_its_file(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    made = toy(tmp_path, "ppo.iterations=1")
    train(made.loop(), Progress())
    path = tmp_path / state.STATE_FILE
    spoil(path)
    with pytest.raises(UserError, match=rf"^{path}: no whole training state of this run \(.+\): remove it"):
        state.load(tmp_path, toy(tmp_path, "ppo.iterations=1").learner)


def test_killed_within_an_iteration_starts_it_again(tmp_path: Path) -> None:
    (tmp_path / "never").mkdir()
    never = resume(tmp_path / "never", *VARIANTS[0])
    calls = []

    def dying(*arguments: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return low_tokens(*arguments)  # type: ignore[arg-type]

    with pytest.raises(Killed):
        train(toy(tmp_path, *VARIANTS[0], scorer=dying).loop(), Progress())
    assert_equal(resume(tmp_path, *VARIANTS[0]), never)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    first = resume(tmp_path)
    rows: list[object] = []
    fresh = toy(tmp_path, on_iteration=rows.append)
    again = train(fresh.loop(), state.load(tmp_path, fresh.learner))
    assert rows == []
    assert_equal((fresh, again), first)


def test_no_state_is_a_fresh_start(tmp_path: Path) -> None:
    fresh = Toy(toy_params())
    before = weights(fresh.learner)
    assert state.load(tmp_path, fresh.learner) == Progress()
    assert same(weights(fresh.learner), before)


def test_the_round_trip_keeps_everything(tmp_path: Path) -> None:
    """Among it a NaN, a number that does not survive rounding, and bad steps."""
    one = Toy(toy_params())
    progress = train(one.loop(), Progress())
    progress.kl_coef = 0.1 + 0.2
    progress.rows[-1]["accuracy"] = float("nan")
    one.learner.bad_steps = 2
    state.save(tmp_path, one.learner, progress)
    other = Toy(toy_params())
    loaded = state.load(tmp_path, other.learner)
    assert other.learner.bad_steps == 2
    assert loaded.panel == progress.panel and [answer["iteration"] for answer in loaded.panel] == [0, 1, 2, 3]
    assert loaded.kl_coef == 0.1 + 0.2
    last = loaded.rows[-1].pop("accuracy"), progress.rows[-1].pop("accuracy")
    assert all(value != value for value in last)
    assert_equal((other, loaded), (one, progress))


def test_saving_leaves_the_progress_as_it_is(tmp_path: Path) -> None:
    one = Toy(toy_params())
    progress = train(one.loop(), Progress())
    best = progress.best_weights
    state.save(tmp_path, one.learner, progress)
    assert progress.best_weights is best and best


def test_with_an_adapter_the_state_is_the_adapter_and_the_value_head(tmp_path: Path) -> None:
    one, _ = resume(tmp_path, *VARIANTS[2])
    with safe_open(tmp_path / state.STATE_FILE, framework="pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118 (not a dict)
    trained = {name: p.numel() for name, p in one.learner.actor_critic.trained_parameters()}
    assert {name.split(".")[-3] for name in trained if name.startswith("policy.")} == {"lora_A", "lora_B"}
    for kind in ("weight", "best"):
        found = {name.removeprefix(f"{kind}/"): size for name, size in sizes.items() if name.startswith(f"{kind}/")}
        assert found == trained
    moments = sum(size for name, size in sizes.items() if name.endswith("exp_avg"))
    assert moments == sum(trained.values())
    assert sum(trained.values()) < sum(p.numel() for p in tiny_model().parameters()) / 4


def test_a_half_written_file_is_not_taken(tmp_path: Path) -> None:
    one = resume(tmp_path)
    content = (tmp_path / state.STATE_FILE).read_bytes()
    (tmp_path / f".{state.STATE_FILE}.new").write_bytes(content[: len(content) // 2])
    fresh = Toy(toy_params())
    assert_equal((fresh, state.load(tmp_path, fresh.learner)), one)
    (tmp_path / state.STATE_FILE).unlink()
    assert state.load(tmp_path, Toy(toy_params()).learner) == Progress()


def test_a_write_that_fails_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume(tmp_path)
    before = (tmp_path / state.STATE_FILE).read_bytes()

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        state.save(tmp_path, Toy(toy_params()).learner, Progress())
    assert (tmp_path / state.STATE_FILE).read_bytes() == before
