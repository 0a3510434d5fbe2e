"""What PPO is measured beside: the arithmetic by hand, and that what is done is not made again."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean

import pytest
import torch

from bench import baselines, workspaces
from bench.baseline_methods import due, leave_one_out, right_answers
from bench.baselines import BASELINES, Row, measure, table
from bench.repeated_samples import Answered, majority_is_right, mean_interval, pass_at_k, passes
from rlhf.data.gsm8k import Problem
from rlhf.models.batches import pad
from rlhf.ppo.rollout import Rollout


def test_leave_one_out_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0, 3.0, 3.0])
    assert leave_one_out(rewards, 3).tolist() == pytest.approx([1.0, -0.5, -0.5, 0.0, 0.0, 0.0], abs=1e-6)
    others = [(rewards[:3].sum() - reward) / 2 for reward in rewards[:3]]
    expected = [float(reward - mean) for reward, mean in zip(rewards[:3], others, strict=True)]
    assert leave_one_out(rewards, 3)[:3].tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="one sample"):
        leave_one_out(rewards, 1)


@pytest.mark.parametrize(("right", "k"), [(0, 2), (1, 1), (2, 3), (3, 2), (5, 4)])
def test_pass_at_k_is_the_mean_over_all_subsets(right: int, k: int) -> None:
    samples = [True] * right + [False] * (5 - right)
    assert pass_at_k(5, right, k) == pytest.approx(fmean(any(subset) for subset in combinations(samples, k)))
    answered = Answered("7", ["7" if good else None for good in samples])
    assert passes(answered, k) == pass_at_k(5, right, k)


def test_groups_of_answers_vote() -> None:
    answered = Answered("4", ["4", "3", "3", "4", None, "4", "5", "5"])
    assert majority_is_right(answered, 1) == 3 / 8
    assert majority_is_right(answered, 2) == fmean([True, False, True, False])
    assert majority_is_right(answered, 4) == fmean([True, False])


def test_the_interval_of_a_mean() -> None:
    mean, low, high = mean_interval([0.0, 1.0, 1.0, 0.0], 0.95)
    assert mean == 0.5
    assert [low, high] == pytest.approx([0.5 - 1.959964 * (1 / 3 / 4) ** 0.5, 0.5 + 1.959964 * (1 / 3 / 4) ** 0.5])


def test_rejection_keeps_right_finished_answers_once() -> None:
    def problem(question: str) -> Problem:
        return Problem(question, "#### 4", "4", "#### 4", 1, "test")

    texts = ["#### 4", "#### 4", "#### 5", "#### 4", "2+2 #### 4"]
    batch = pad([[1, 2]] * 5, [[3, 9], [3, 9], [4, 9], [3, 9], [5, 3, 9]], 0)
    rollout = Rollout(
        batch=batch,
        problems=[problem(name) for name in ("a", "a", "a", "b", "a")],
        texts=texts,
        finished=torch.tensor([True, True, True, False, True]),
        sampler_logprobs=torch.zeros(batch.mask.shape),
    )
    kept = right_answers([rollout, rollout], "strict")
    assert [(one.prompt, one.response) for one in kept] == [([1, 2], [3, 9]), ([1, 2], [5, 3, 9])]


@pytest.mark.parametrize(("steps", "parts"), [(12, 4), (10, 4), (3, 4)])
def test_validations_come_after_equal_parts(steps: int, parts: int) -> None:
    at = [step for step in range(1, steps + 1) if due(step, steps, parts)]
    assert at[-1] == steps and len(at) == min(steps, parts)
    assert max(b - a for a, b in pairwise([0, *at])) - min(b - a for a, b in pairwise([0, *at])) <= 1


def test_the_first_seed_decides_the_setting_and_nothing_is_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are stood in for by what they write; the second setting of every grid validates best."""
    made: list[tuple[str, ...]] = []

    def run(workspace: Path, module: str, arguments: list[str]) -> None:
        made.append((workspace.name, *arguments))
        match arguments:
            case ["answer", checkpoint, file]:
                right = 1 if checkpoint == "models/sft" else 2
                rows: list[object] = [graded(number < right) for number in range(4)]
            case ["sample", file]:
                rows = [{"gold": "4", "answers": ["4"] * 16 + ["5"] * 16} for _ in range(4)]
            case [_, directory, *setting]:
                place = workspace / directory
                place.mkdir(parents=True)
                best = tuple(setting) in {baseline.grid[1] for baseline in BASELINES.values()}
                told = {"validation": [0.25, 0.75 if best else 0.5], "selected": 1}
                (place / "training.json").write_text(json.dumps(told))
                return
            case _:
                return
        (workspace / file).parent.mkdir(exist_ok=True)
        (workspace / file).write_text(json.dumps(rows))

    monkeypatch.setattr(baselines, "run", run)
    monkeypatch.setattr(workspaces, "run", run)
    monkeypatch.setattr(baselines, "TABLE", tmp_path / "results" / "baselines.csv")
    rows = measure(tmp_path)
    training = [run for run in made if len(run) > 1 and run[1] in ("rejection", "rloo")]
    assert sum(name == "seed-0" for name, *_ in training) == sum(len(b.grid) for b in BASELINES.values())
    assert sum(name == "seed-1" for name, *_ in training) == len(BASELINES)
    by_method = {row.method: row for row in rows if row.seed == 2}
    assert (by_method["SFT"].accuracy, by_method["PPO"].accuracy, by_method["PPO"].gain) == (0.25, 0.5, 0.25)
    assert by_method["RLOO"].setting == " ".join(BASELINES["RLOO"].grid[1])
    assert by_method["SFT, pass@1"].accuracy == 0.5
    count = len(made)
    assert measure(tmp_path) == rows and len(made) == count


def graded(right: bool) -> dict[str, object]:
    verdicts = dict.fromkeys(("correct", "strict", "flexible", "parsed", "finished"), right)
    return verdicts | {"question": "?", "gold": "4", "response": "", "prompt": [1], "tokens": [2], "too_long": False}


def test_the_table_by_hand() -> None:
    rows = [Row("SFT", 0, 0.25, 0.1, 0.4, 0.0, -0.1, 0.1), Row("SFT", 1, 0.5, 0.4, 0.6, 0.0, -0.1, 0.1)]
    rows += [Row("RLOO", seed, 0.75, 0.6, 0.8, gain, 0.2, 0.6, "ppo.lr=1") for seed, gain in ((0, 0.5), (1, 0.25))]
    lines = table(rows).splitlines()
    assert lines[2] == "| SFT | 25.0 | 50.0 | 37.5 |  |"
    assert lines[3] == "| RLOO (`ppo.lr=1`) | 75.0: +50.0 [20.0, 60.0] | 75.0: +25.0 [20.0, 60.0] | 75.0 | 37.5 |"
