"""The command that measures over-optimisation: what it runs, reads and draws; the runs themselves are no test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import frontier, frontier_plots, workspaces
from bench.best_of_n import kl_of_best
from bench.frontier import COEFFICIENTS, PREFERENCES, curve_file, main, overrides, read_curve, read_points, words
from bench.frontier_plots import BEST_OF_N, PPO, Point, curves, distances, mean_point, running_means
from rlhf import config
from rlhf.data.preferences import Pair, write_pairs
from rlhf.errors import UsageError, UserError
from rlhf.stage import override_place, write_json

CURVE = """iteration,score,accuracy,validation_accuracy,kl_sequence,steps
0,,,0.4,,
1,0.1,0.35,0.5,0,12
2,0.6,0.45,0.7,0.25,12
3,0.9,0.55,0.6,1.5,12
"""


def test_the_settings_are_valid_and_differ_where_they_say(tmp_path: Path) -> None:
    made = []
    for preferences in PREFERENCES:
        config.write(config.compose(words(preferences, 3)), tmp_path / config.PARAMS_FILE)
        params = config.load(overrides(0.2), tmp_path / config.PARAMS_FILE)
        assert (params.seed, params.ppo.reward.source, params.ppo.kl.coef) == (3, "reward_model", 0.2)
        assert params.ppo.eval_every == 1
        made.append((params.preferences.questions, params.preferences.samples))
        assert len({curve_file(tmp_path, coef) for coef in COEFFICIENTS}) == 3
    assert made == list(PREFERENCES)


def test_a_curve_puts_rollouts_beside_the_validation_of_the_same_policy(tmp_path: Path) -> None:
    path = tmp_path / "ppo.csv"
    path.write_text(CURVE)
    assert read_curve(path) == [
        {"kl": 0, "score": 0.1, "accuracy": 0.35, "greedy": 0.4},
        {"kl": 0.25, "score": 0.6, "accuracy": 0.45, "greedy": 0.5},
        {"kl": 1.5, "score": 0.9, "accuracy": 0.55, "greedy": 0.7},
    ]


@pytest.fixture
def stood_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages and sampler are stood in for by what they write; the list tells which of them have run."""
    made: list[str] = []

    def run(workspace: Path, stage: str, arguments: list[str]) -> None:
        made.append(stage.removeprefix("stages."))
        if made[-1] == "collect_preferences":
            write_pairs(workspace / "data" / "preferences" / "train.parquet", [Pair("q", "a", "b", "sampled")] * 7)
        if made[-1] == "train_reward":
            (workspace / "metrics").mkdir()
            write_json(workspace / "metrics" / "reward_model.json", {"pair_accuracy": 0.875, "pairs": 8})
        if made[-1] == "train_ppo":
            place = override_place(workspace, "train_ppo", config.load(arguments, workspace / config.PARAMS_FILE))
            (place / "plots").mkdir(parents=True, exist_ok=True)
            (place / "plots" / "ppo.csv").write_text(CURVE)

    def sample_best(missing: list[Path]) -> None:
        for workspace in missing:
            if not frontier.best_file(workspace).is_file():
                made.append("best_of_n")
                correct = np.array([[True, False]])
                np.savez(frontier.best_file(workspace), scores=np.array([[2.0, 1.0]]), correct=correct)

    monkeypatch.setattr(frontier, "run", run)
    monkeypatch.setattr(workspaces, "run", run)
    monkeypatch.setattr(frontier, "sample_best", sample_best)
    monkeypatch.setattr(frontier, "SEEDS", (0,))
    monkeypatch.setattr(frontier, "TABLE", tmp_path / "results" / "frontier.csv")
    monkeypatch.setattr(frontier_plots, "IMAGES", tmp_path / "img")
    return made


def test_what_is_done_is_not_made_again(tmp_path: Path, stood_in: list[str]) -> None:
    frontier.measure(tmp_path)
    assert stood_in == [*frontier.PREPARATION * 2, *["best_of_n"] * 2, *["train_ppo"] * 6]
    frontier.measure(tmp_path)
    assert len(stood_in) == 18
    curve_file(tmp_path / "seed-0-800x4", COEFFICIENTS[1]).unlink()
    frontier.measure(tmp_path)
    assert stood_in[18:] == ["train_ppo"]


def test_the_table_and_the_plots(tmp_path: Path, stood_in: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    frontier.measure(tmp_path)
    assert "7 pairs of 800 questions: 87.5 % of 8 held-out pairs in the right order" in capsys.readouterr().out
    points = read_points(frontier.TABLE)
    assert len(points) == 2 * (3 * 3 + 2)
    assert points[1] == Point(PPO, 800, 7, 0, COEFFICIENTS[0], 1, 0.25, 0.6, 0.45, 0.5)
    best = points[10]
    assert best._replace(kl=0) == Point(BEST_OF_N, 800, 7, 0, None, 2, 0, 2.0, 1.0, None)
    assert best.kl == pytest.approx(kl_of_best(2), rel=1e-5)
    assert main(["--draw"]) == 0
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "img").iterdir()}
    assert sorted(drawn) == ["frontier.png", "overoptimisation.png"]
    assert all(png.startswith(b"\x89PNG") for png in drawn.values())
    main(["--draw"])
    assert drawn == {path.name: path.read_bytes() for path in (tmp_path / "img").iterdir()}


def test_seeds_are_averaged_step_by_step() -> None:
    points = [
        Point(PPO, 800, 2000, 0, 0.05, 1, 1.0, 0.5, 0.4, 0.5),
        Point(PPO, 800, 2100, 1, 0.05, 1, 3.0, 0.7, 0.6, 0.7),
        Point(BEST_OF_N, 800, 2000, 0, None, 1, 0.0, 0.0, 0.4, None),
        Point(PPO, 800, 2000, 0, 0.05, 0, 0.0, 0.1, 0.4, 0.4),
    ]
    ppo, best = curves(points)
    assert (ppo.method, ppo.coef, [point.step for point in ppo.points]) == (PPO, 0.05, [0, 1])
    assert ppo.points[1] == mean_point(points[:2])
    assert ppo.points[1]._replace(score=0) == Point(PPO, 800, 2050, 0, 0.05, 1, 2.0, 0, 0.5, 0.6)
    assert ppo.points[1].score == pytest.approx(0.6)
    assert best.points == [points[2]]


def test_a_line_is_the_mean_of_five_iterations() -> None:
    steps = [Point(PPO, 800, 2000, 0, 0.05, step, kl, 0.5, accuracy, 0.5) for step, kl, accuracy in [
        (0, 0.0, 0.4), (1, 1.0, 0.5), (2, 2.0, 0.6), (3, 7.0, 0.7), (4, 5.0, 0.8), (5, 6.0, 0.9)
    ]]  # fmt: skip
    means = running_means(steps)
    assert [point.kl for point in means] == [0, 1, 3, pytest.approx(21 / 5)]
    assert [point.accuracy for point in means] == pytest.approx([0.4, 0.5, 0.6, 0.7])


def test_the_root_of_the_kl_and_percent() -> None:
    points = [Point(PPO, 800, 2000, 0, 0.05, 0, kl, 0.5, 0.25, 0.5) for kl in (-0.01, 0.0, 2.25)]
    assert distances(points) == ([0.0, 0.0, 1.5], [25.0] * 3)


def test_what_it_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="^--redraw: no such option"):
        main(["--redraw"])
    monkeypatch.setattr(frontier, "TABLE", tmp_path / "frontier.csv")
    with pytest.raises(UserError, match="^frontier.csv is missing: run python -m bench.frontier"):
        main(["--draw"])
    frontier.TABLE.write_text("method,pairs\nppo,many\n")
    with pytest.raises(UserError, match="^frontier.csv: not as python -m bench.frontier writes it"):
        main(["--draw"])
