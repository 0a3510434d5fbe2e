"""Measures what a learned reward is worth: PPO's and best-of-n's true accuracy, the more the reward model is leant on.

    python -m bench.frontier            measures what is missing, then draws
    python -m bench.frontier --draw     draws what bench/results/frontier.csv holds

Each number of preference pairs has a workspace (bench/workspaces.py) with a reward model of its own. On it PPO runs
with each KL coefficient, and the best of n answers of the SFT policy is taken (bench/best_of_n.py). What is done is not
made again. It writes bench/results/frontier.csv after every run, and the plots with bench/frontier_plots.py.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import best_of_n, frontier_plots
from bench.frontier_plots import BEST_OF_N, PPO, Point
from bench.workspaces import RESULTS, measuring, output, prepare, run, write_csv
from rlhf import config, runtime
from rlhf.data.gsm8k import read_prepared
from rlhf.data.preferences import read_pairs
from rlhf.errors import UsageError, UserError, run_command
from rlhf.files import appearing


class Preferences(NamedTuple):
    """How many preferences a reward model learns from: the questions asked, and the answers sampled to each."""

    questions: int
    samples: int


SEEDS = (0, 1, 2)
PREFERENCES = (Preferences(800, 4), Preferences(3600, 6))
COEFFICIENTS = (0.02, 0.05, 0.2)
SETTING = ("ppo.iterations=20", "ppo.eval_every=1")
PREPARATION = ("prepare_data", "fetch_sft", "finetune_sft", "collect_preferences", "train_reward")
ANSWERS = 64
"""Answers to each validation question, of which the best of n is taken."""

TABLE = RESULTS / "frontier.csv"


def main(arguments: Sequence[str]) -> int:
    """Measures what is missing and draws, or with --draw draws alone; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    if unknown := next((word for word in arguments if word != "--draw"), None):
        raise UsageError(f"{unknown}: no such option: take --draw or nothing")
    if not arguments:
        with measuring("frontier") as root:
            measure(root)
    frontier_plots.draw(read_points(TABLE))
    return 0


def measure(root: Path) -> None:
    """Runs what is missing, seed by seed, and writes what there is after each run."""
    for seed in SEEDS:
        workspaces = {
            preferences: prepare(root, name(preferences, seed), words(preferences, seed), PREPARATION)
            for preferences in PREFERENCES
        }
        for preferences, workspace in workspaces.items():
            print(f"frontier: seed {seed}: {describe(preferences, workspace)}", flush=True)
        sample_best(list(workspaces.values()))
        write_points(root)
        for coef in COEFFICIENTS:
            for preferences, workspace in workspaces.items():
                start = time.monotonic()
                if not curve_file(workspace, coef).is_file():
                    run(workspace, "stages.train_ppo", overrides(coef))
                last = read_curve(curve_file(workspace, coef))[-1]
                print(
                    f"frontier: seed {seed} {name(preferences, seed)} kl.coef {coef}: score {last['score']:.2f}, "
                    f"{100 * last['accuracy']:.1f} % right, KL {last['kl']:.2f} ({time.monotonic() - start:.0f} s)",
                    flush=True,
                )
                write_points(root)


def name(preferences: Preferences, seed: int) -> str:
    """The workspace's name."""
    return f"seed-{seed}-{preferences.questions}x{preferences.samples}"


def words(preferences: Preferences, seed: int) -> list[str]:
    """What the workspace's params are composed of."""
    counts = [f"preferences.questions={preferences.questions}", f"preferences.samples={preferences.samples}"]
    return ["scale=tiny", "reward=reward_model", f"seed={seed}", *counts]


def overrides(coef: float) -> list[str]:
    """What PPO is told."""
    return [*SETTING, f"ppo.kl.coef={coef}"]


def curve_file(workspace: Path, coef: float) -> Path:
    """Where PPO writes its curve."""
    return output(workspace, "train_ppo", overrides(coef), "plots/ppo.csv")


def best_file(workspace: Path) -> Path:
    """Where the score and the verdict of each sampled answer are kept."""
    return workspace / "best_of_n.npz"


def describe(preferences: Preferences, workspace: Path) -> str:
    """One line on the workspace's reward model."""
    held_out = json.loads((workspace / "metrics" / "reward_model.json").read_text())
    return (
        f"{train_pairs(workspace)} pairs of {preferences.questions} questions: "
        f"{100 * held_out['pair_accuracy']:.1f} % of {held_out['pairs']} held-out pairs in the right order"
    )


def train_pairs(workspace: Path) -> int:
    """The pairs that the workspace's reward model was trained on."""
    return len(read_pairs(workspace / "data" / "preferences" / "train.parquet"))


def sample_best(workspaces: Sequence[Path]) -> None:
    """Samples validation answers of the SFT policy, which is the same in all of these workspaces, once, and scores
    them with the reward model of each."""
    missing = [workspace for workspace in workspaces if not best_file(workspace).is_file()]
    if not missing:
        return
    params = config.load([], missing[0] / config.PARAMS_FILE)
    runtime.configure(params.runtime, params.seed)
    problems = read_prepared(missing[0] / "data" / "prepared" / "validation.parquet")
    answers = best_of_n.sample_answers(missing[0] / "models" / "sft", problems, ANSWERS, params)
    for workspace in missing:
        scores = best_of_n.score_answers(workspace / "models" / "reward", answers, params)
        with appearing(best_file(workspace)) as written, written.open("wb") as file:
            np.savez_compressed(file, scores=scores, correct=answers.correct)


def read_curve(path: Path) -> list[Mapping[str, float]]:
    """What is known of the policy after 0, 1, 2, ... updates: kl, score and accuracy of its rollouts, and `greedy`,
    its validation accuracy.

    Row i of plots/ppo.csv tells of rollouts before the i-th update and of a validation after it; row 0 has but the
    validation. So the last policy, validated and never sampled, is left out.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {
            "kl": float(sampled["kl_sequence"]),
            "score": float(sampled["score"]),
            "accuracy": float(sampled["accuracy"]),
            "greedy": float(validated["validation_accuracy"]),
        }
        for validated, sampled in pairwise(rows)
    ]


def points(workspace: Path, preferences: Preferences, seed: int) -> Iterator[Point]:
    """What has been measured in a workspace: PPO's curves, then best-of-n."""
    pairs = train_pairs(workspace)
    for coef in COEFFICIENTS:
        if (file := curve_file(workspace, coef)).is_file():
            for step, values in enumerate(read_curve(file)):
                yield Point(PPO, preferences.questions, pairs, seed, coef, step, **values)
    if (file := best_file(workspace)).is_file():
        with np.load(file) as arrays:
            for best in best_of_n.frontier(arrays["scores"], arrays["correct"]):
                yield Point(
                    BEST_OF_N,
                    preferences.questions,
                    pairs,
                    seed,
                    None,
                    best.n,
                    best.kl,
                    best.score,
                    best.accuracy,
                    None,
                )


def write_points(root: Path) -> None:
    """Writes what has been measured so far."""
    rows = [
        ["" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in point]
        for seed in SEEDS
        for preferences in PREFERENCES
        if (root / name(preferences, seed) / "train_reward.done").is_file()
        for point in points(root / name(preferences, seed), preferences, seed)
    ]
    write_csv(TABLE, [Point._fields, *rows])


def read_points(path: Path) -> list[Point]:
    """The points of the table; raises UserError where it is missing or not as `write_points` writes it."""
    try:
        with path.open(newline="") as file:
            return [_point(row) for row in csv.DictReader(file)]
    except FileNotFoundError:
        raise UserError(f"{path.name} is missing: run python -m bench.frontier") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path.name}: not as python -m bench.frontier writes it: remove it and run that") from None


def _point(row: Mapping[str, str]) -> Point:
    return Point(
        method=row["method"],
        questions=int(row["questions"]),
        pairs=int(row["pairs"]),
        seed=int(row["seed"]),
        coef=float(row["coef"]) if row["coef"] else None,
        step=int(row["step"]),
        kl=float(row["kl"]),
        score=float(row["score"]),
        accuracy=float(row["accuracy"]),
        greedy=float(row["greedy"]) if row["greedy"] else None,
    )


if __name__ == "__main__":
    stopped = "interrupted: every run that was done stays done, run it again to go on"
    sys.exit(run_command("frontier", lambda: main(sys.argv[1:]), stopped))
