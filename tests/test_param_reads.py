"""The finder of params that are read, on code whose reads are known."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.param_reads import ROOT, leaf_keys, read_anywhere

CODE = """
from __future__ import annotations
from collections.abc import Callable
from rlhf.params import Critic, Data, Params, Ppo

LR = 3

def direct(params: Params) -> float:
    return params.ppo.lr

class Learner:
    def __init__(self, settings: Ppo) -> None:
        self.settings = settings

    def step(self) -> float:
        def inner() -> int:
            return self.settings.epochs
        return inner()

def by_default(settings: Critic | None) -> float:
    return settings.lr if settings else 0.0

def in_a_list(many: list[Params]) -> list[int]:
    return [one.seed for one in many]

def by_pattern(data: Data, split: str) -> int | None:
    return getattr(data, f"max_{split}")

def not_params(optimiser: Other) -> float:
    return optimiser.batch_size

class Other:
    batch_size = 3
"""


def test_reads_are_told_apart_by_the_section_they_come_from(tmp_path: Path):
    for package in ("rlhf", "stages"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    shutil.copytree(ROOT / "rlhf" / "params", tmp_path / "rlhf" / "params")
    (tmp_path / "rlhf" / "code.py").write_text(CODE)
    (tmp_path / "stages" / "other.py").write_text("def f(lr: float) -> float:\n    return lr\n" * 9)
    caps = {key for key in leaf_keys() if key.startswith("data.max_")}  # whatever the split is
    expected = {"ppo.lr", "ppo.epochs", "ppo.critic.lr", "seed", *caps}
    assert read_anywhere(tmp_path) == expected
    assert expected < set(leaf_keys())
