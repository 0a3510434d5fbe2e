"""An upgrade that changes PPO is seen: the curve of the installed versions is the one that was kept for them."""

from __future__ import annotations

import json

import pytest

from tests.rlhf.ppo import golden_curve
from tests.rlhf.ppo.golden_curve import COMMAND, TOLERANCE, curve, differences, golden_file


def test_the_curve_is_that_of_these_versions() -> None:
    file = golden_file()
    assert file.is_file(), f"{file.name} is missing: compare and write it with {COMMAND}"
    found = differences(curve(), json.loads(file.read_text()))
    assert max(found.values()) <= TOLERANCE, f"PPO has changed: {found}; if that is intended: {COMMAND}"


@pytest.mark.parametrize("change", ["ppo.lr=0.00303", "ppo.lam=0.99", "ppo.clip_high=0.19", "ppo.kl.coef=0.0101"])
def test_a_small_change_of_the_recipe_is_more_than_the_tolerance(change: str) -> None:
    assert max(differences(curve(change), curve()).values()) > TOLERANCE


def test_differences_are_the_largest_and_relative_above_one() -> None:
    one = [{"score": 1.0, "kl_token": 0.5}, {"score": 22.0, "kl_token": 0.5}]
    other = [{"score": 1.1, "kl_token": 0.5}, {"score": 20.0, "kl_token": float("nan")}]
    found = differences(one, other)
    assert list(found)[:2] == ["kl_token", "score"]
    assert found["kl_token"] == float("inf") and found["score"] == pytest.approx(0.1)
    assert found["entropy"] == 0


def test_the_command_compares_and_writes(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(golden_curve, "DIRECTORY", tmp_path / "golden")
    golden_curve.main()
    golden_curve.main()
    assert json.loads(golden_curve.golden_file().read_text()) == curve()
    assert "largest difference 0.0e+00" in capsys.readouterr().out
