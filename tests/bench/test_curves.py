"""Learning curves: what is read of them, and that they are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import curves
from bench.curves import Curve, draw, read_curves
from rlhf.errors import UserError

TABLE = "iteration,score,accuracy,validation_accuracy\n0,,,0.5\n1,0.2,0.25,\n2,0.4,0.375,0.75\n"


def test_rollouts_and_validation_have_their_own_iterations(tmp_path: Path) -> None:
    for name in ("kl-loss-0", "kl-loss-10", "lora-1"):
        (tmp_path / f"{name}.csv").write_text(TABLE)
    found = read_curves(tmp_path)
    assert {choice: sorted(seeds) for choice, seeds in found.items()} == {"kl-loss": [0, 10], "lora": [1]}
    assert found["lora"][1] == Curve(rollouts={1: 25.0, 2: 37.5}, validation={0: 50.0, 2: 75.0})


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("seedless.csv", TABLE, "no CHOICE-SEED.csv"),
        ("lora-x.csv", TABLE, "no CHOICE-SEED.csv"),
        ("lora-1.csv", "a,b\n1,2\n", "not a run's plots/ppo.csv"),
        ("lora-1.csv", "", "not a run's plots/ppo.csv"),
        ("lora-1.txt", TABLE, "no curves"),
    ],
)
def test_what_is_no_curve_is_one_line(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=told):
        read_curves(tmp_path)


def test_the_kept_curves_are_drawn_whole_and_alike(tmp_path: Path) -> None:
    kept = read_curves(curves.CURVES)
    assert all(sorted(seeds) == [0, 1, 2] for seeds in kept.values())
    pictures = [tmp_path / "one.png", tmp_path / "two.png"]
    for picture in pictures:
        draw(kept, picture)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert pictures[0].read_bytes().startswith(b"\x89PNG")
