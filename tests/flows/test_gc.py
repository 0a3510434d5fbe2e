"""What a sweep takes and what it leaves, in a small repository with the real git and dvc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows import gc
from flows.pipeline import LOCK
from rlhf import anchors, locks
from tasks import workspaces


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "checkout"
    place.mkdir()
    (place / ".gitignore").write_text("/.workspaces/\n/.cache/\n/runs/\n.partial/\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], cwd=place, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "--quiet"], cwd=place, check=True)
    subprocess.run([*git, "add", "--all"], cwd=place, check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "start"], cwd=place, check=True)
    monkeypatch.setattr(anchors, "CHECKOUT", place)
    monkeypatch.setattr(anchors, "main_checkout", lambda: place)
    (place / "runs").mkdir()
    with pytest.raises(ZeroDivisionError), workspaces.workspace("failed"):
        raise ZeroDivisionError
    return place


def test_a_sweep_takes_what_ended_runs_and_killed_stages_left(checkout: Path) -> None:
    unused = checkout / ".dvc/cache/files/md5/00/000000000000000000000000000000"
    unused.parent.mkdir(parents=True)
    unused.touch()
    ended = subprocess.Popen(["true"])
    ended.wait()
    places = (checkout / ".partial", checkout / "models/.partial")  # the second for models on a disk of their own
    for place in places:
        for process, end in ((os.getpid(), "a_1"), (ended.pid, "b_2")):
            (place / f"train_ppo-{process}-{end}" / "models").mkdir(parents=True)
    assert gc.main() == 0
    for place in places:
        assert [path.name for path in place.iterdir()] == [f"train_ppo-{os.getpid()}-a_1"]
    assert not (checkout / ".workspaces" / "failed").exists()
    assert not (checkout / "runs").exists()
    assert not unused.exists()


@pytest.mark.parametrize("where", [LOCK, Path(".workspaces/failed.lock")])
def test_nothing_is_touched_while_a_run_lives(checkout: Path, where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locks.exclusive(checkout / where, ""):
        assert gc.main() == 1
    assert capsys.readouterr().err.startswith(f"gc: process {os.getpid()} runs the pipeline in {checkout}")
    assert (checkout / ".workspaces" / "failed").is_dir()
    assert (checkout / "runs").is_dir()
