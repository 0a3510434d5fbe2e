"""The test hook kills at the visit that it names, and nowhere else."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from rlhf import faults


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Process and signal of each kill, which is not carried out."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(faults, "_visits", Counter())
    monkeypatch.setattr(os, "kill", lambda process, number: seen.append((process, number)))
    return seen


@pytest.mark.parametrize(
    ("wanted", "killed_at"),
    [(None, []), ("state.synced", [0]), ("state.synced:1", [0]), ("state.synced:3", [2]), ("state.renamed", [])],
)
def test_the_visit_that_is_named(
    kills: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, wanted: str | None, killed_at: list[int]
) -> None:
    monkeypatch.delenv(faults.KILL_VARIABLE, raising=False)
    if wanted:
        monkeypatch.setenv(faults.KILL_VARIABLE, wanted)
    seen = []
    for visit in range(4):
        faults.reach("state.synced")
        faults.reach("best.kept")
        if kills:
            assert kills.pop() == (os.getpid(), signal.SIGKILL)
            seen.append(visit)
    assert seen == killed_at


def test_every_point_is_documented_and_reached_somewhere() -> None:
    code = "".join(path.read_text() for path in Path(faults.__file__).parent.rglob("*.py"))
    assert sorted(re.findall(r'faults\.reach\("(.+?)"\)', code)) == sorted(faults.POINTS)
