"""The ablation command: what it runs, and the table that it makes; the runs themselves are no test."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import choices, workspaces
from bench.choices import CHANGES, Result, main, overrides, result_file, table
from rlhf import config
from rlhf.errors import UsageError
from rlhf.stage import override_place
from rlhf.tracking import flatten


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    config.write(config.compose(["scale=tiny"]), tmp_path / config.PARAMS_FILE)
    return tmp_path


def test_every_change_is_valid_and_changes_what_it_names(workspace: Path) -> None:
    loaded = {name: config.load(overrides(name), workspace / config.PARAMS_FILE) for name in CHANGES}
    flat = {name: flatten(params.model_dump()) for name, params in loaded.items()}
    for name, params in flat.items():
        changed = {key for key, value in params.items() if value != flat["baseline"][key]}
        assert changed == {override.partition("=")[0] for override in CHANGES[name]}
    places = {override_place(workspace, "train_ppo", params) for params in loaded.values()}
    assert len(places) == len(CHANGES) == 9


def test_a_result_is_looked_for_where_the_stage_writes_it(workspace: Path) -> None:
    params = config.load(overrides("lambda"), workspace / config.PARAMS_FILE)
    place = override_place(workspace, "train_ppo", params)
    assert result_file(workspace, "lambda") == place / "metrics" / "ppo.json"
    assert place.parent == workspace / "runs" / "train_ppo"


def test_a_run_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage is stood in for by what it writes."""
    made: list[str] = []

    def run(workspace: Path, stage: str, arguments: list[str]) -> None:
        made.append(stage)
        if stage == "stages.train_ppo":
            place = override_place(workspace, "train_ppo", config.load(arguments, workspace / config.PARAMS_FILE))
            (place / "metrics").mkdir(parents=True)
            numbers = '{"validation_accuracy": 0.75, "kl_sequence": 2.5}'
            (place / "metrics" / "ppo.json").write_text(f'{{"initial": {numbers}, "final": {numbers}}}')

    monkeypatch.setattr(choices, "run", run)
    monkeypatch.setattr(workspaces, "run", run)
    monkeypatch.setattr(choices, "TABLE", tmp_path / "results" / "choices.csv")
    choices.measure(tmp_path, ["gamma"])
    assert made == [*(f"stages.{stage}" for stage in choices.PREPARATION), "stages.train_ppo"] * 3
    choices.measure(tmp_path, ["gamma", "lambda"])
    assert made[12:] == ["stages.train_ppo"] * 3
    linked = tmp_path / "seed-2" / "rlhf" / "stage.py"
    assert linked.resolve() == tmp_path / "code" / "rlhf" / "stage.py"
    lines = (tmp_path / "results" / "choices.csv").read_text().splitlines()
    assert lines[:2] == ["change,seed,before,after,kl_sequence", "lambda,0,0.75,0.75,2.5"]
    assert len(lines) == 1 + 6


def test_the_table_by_hand() -> None:
    results = {
        "baseline": [Result("baseline", 0, 0.4, 0.8, 2.0), Result("baseline", 1, 0.3, 0.7, 3.0)],
        "lambda": [Result("lambda", 0, 0.4, 0.85, 4.0), Result("lambda", 1, 0.3, 0.68, 5.0)],
    }
    rows = table(results).splitlines()
    assert rows[2] == "| before PPO | 40.0 | 30.0 | 35.0 (30.0 to 40.0) | | |"
    assert rows[3] == "| default | 80.0 | 70.0 | 75.0 (70.0 to 80.0) |  | 2.50 |"
    assert rows[4] == "| `ppo.lam=1` | 85.0 | 68.0 | 76.5 (68.0 to 85.0) | +1.5 (-2.0 to +5.0) | 4.50 |"
    assert len({row.count("|") for row in rows}) == 1


def test_a_change_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^nope: no such change: take baseline, lambda"):
        main(["nope"])
