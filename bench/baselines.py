"""Measures PPO beside other ways to use as many samples of the SFT policy, at tiny scale, over three seeds.

    python -m bench.baselines

Each seed has a workspace (bench/workspaces.py), where data, SFT model and PPO's policy are made by their stages; the
other methods are runs of bench/baseline_runs.py there. The setting of a method is the one of its grid that validates
best with the first seed. What is done is not made again. It writes bench/results/baselines.csv after every run, and the
table in docs/results.md once all rows are there.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from bench.repeated_samples import Answered, majority_is_right, mean_interval, passes
from bench.workspaces import CODE, RESULTS, measuring, prepare, run, with_marked, write_text
from rlhf import anchors
from rlhf.errors import UsageError, run_command
from rlhf.evaluation.accuracy import Graded
from rlhf.evaluation.statistics import compare

Setting = tuple[str, ...]


class Baseline(NamedTuple):
    """A method, and the settings that it is tried with: what `bench.baseline_runs` is told after the directory."""

    method: str
    grid: tuple[Setting, ...]


LRS = "0.0003", "0.001", "0.003"
BASELINES = {
    "rejection-sampling SFT": Baseline(
        "rejection",
        tuple(("rounds=1", f"epochs={n}", f"sft.finetune.lr={lr}") for n, lr in product((2, 6), LRS)),
    ),
    "expert iteration": Baseline(
        "rejection",
        tuple((f"rounds={n}", "epochs=2", f"sft.finetune.lr={lr}") for n, lr in product((4, 12), LRS)),
    ),
    "RLOO, one pass": Baseline("rloo", tuple(("ppo.epochs=1", f"ppo.lr={lr}") for lr in LRS)),
    "RLOO, three passes": Baseline("rloo", tuple(("ppo.epochs=3", f"ppo.lr={lr}") for lr in LRS)),
}
