from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import overhead
from bench.overhead import Took, markdown, require_equal
from rlhf.errors import UserError


def test_the_table_compares_medians_and_says_what_is_allowed() -> None:
    seconds = {"dvc repro": (40.0, 50.0, 100.0), "flow": (58.0, 66.0, 61.0)}
    took = [Took(number, way, each[number]) for number in range(3) for way, each in seconds.items()]
    row = markdown(took).splitlines()[2]
    assert overhead.STAGES == 8
    assert row == "| 50.0 s | 61.0 s | 11.0 s, 1.4 s a stage | 29.0 s |"


def test_other_outputs_are_no_measurement(tmp_path: Path) -> None:
    clones = {way: tmp_path / way for way in overhead.WAYS}
    for directory in clones.values():
        directory.mkdir()
        (directory / "dvc.lock").write_text("the same")
    require_equal(clones)
    (clones["flow"] / "dvc.lock").write_text("another")
    with pytest.raises(UserError, match="they did not do the same work"):
        require_equal(clones)


def test_nothing_is_shared_with_the_checkout(tmp_path: Path) -> None:
    assert set(overhead.places(tmp_path).values()) == {
        f"{tmp_path}/.state",
        f"{tmp_path}/.journal",
        f"{tmp_path}/.mirror",
    }


def test_a_command_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="failed: no such thing"):
        overhead.run([sys.executable, "-c", "import sys; sys.exit('no such thing')"], tmp_path, {})
