"""What a sweep takes and what it leaves, in a small repository with the real git and dvc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows import gc
from flows.pipeline import LOCK
from rlhf import anchors, config, locks, tracking
from rlhf.config import compose
from rlhf.stage import _staging
from rlhf.tracking import journal
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
    config.write(compose(["scale=smoke"]), place / "params.yaml")
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("RLHF_JOURNAL_DIR", str(tmp_path / "journal"))
    monkeypatch.setenv("RLHF_DOWNLOADS_DIR", str(tmp_path / "downloads"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    with pytest.raises(ZeroDivisionError), workspaces.workspace("failed"):
        raise ZeroDivisionError
    return place


def test_a_sweep_takes_what_ended_runs_and_killed_stages_left(checkout: Path) -> None:
    unused = checkout / ".dvc/cache/files/md5/00/000000000000000000000000000000"
    unused.parent.mkdir(parents=True)
    unused.touch()
    # the second for models on a disk of their own
    left = [checkout / place / ".partial" / "train_ppo-b_2" for place in ("", "models")]
    for place in left:
        (place / "models").mkdir(parents=True)
    assert gc.main([]) == 0
    assert not any(place.exists() for place in left)
    assert not (checkout / ".workspaces" / "failed").exists()
    assert not (checkout / "runs").exists()
    assert not unused.exists()


def state(name: str, age: int, size: int = 3_000_000) -> Path:
    """A training state of so many bytes, last written so many seconds ago."""
    place = anchors.state_dir() / "train_ppo" / name
    place.mkdir(parents=True)
    (place / "state.safetensors").write_bytes(os.urandom(size))
    then = time.time() - age
    os.utime(place / "state.safetensors", (then, then))
    return place


def test_within_the_budget_all_that_is_of_use_stays(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = [state("old", 1000), state("new", 10)]
    for words in ([], ["limits.disk_gb=0"]):
        assert gc.main(words) == 0
        assert all(place.is_dir() for place in states)
    out = capsys.readouterr().out
    assert "gc: 0.0 GB are taken, of limits.disk_gb=100\n" in out


def test_over_the_budget_the_oldest_state_goes_first_and_one_in_use_stays(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used, old, new = state("used", 2000), state("old", 1000), state("new", 10)
    with locks.exclusive(used / "lock", ""):
        assert gc.main(["limits.disk_gb=0.007"]) == 0
        assert [place.is_dir() for place in (used, old, new)] == [True, False, True]
        assert f"gc: removed training state {old}: 3.0 MB\n" in capsys.readouterr().out
        assert gc.main(["limits.disk_gb=0.001"]) == 1
    assert [place.is_dir() for place in (used, new)] == [True, False]
    error = capsys.readouterr().err
    assert error.startswith("gc: limits.disk_gb=0.001: 0.0 GB are taken, and registered versions") and len(error) < 200


def test_over_the_budget_downloads_go(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = anchors.downloads_dir()
    place.mkdir()
    for name in ("sha256-a", "sha256-b.part"):
        (place / name).write_bytes(os.urandom(3_000_000))
    assert gc.main(["limits.disk_gb=0.01"]) == 0
    assert len(list(place.iterdir())) == 2
    assert gc.main(["limits.disk_gb=0.001"]) == 0
    assert {path.suffix for path in place.iterdir()} == {".lock"}
    assert f"gc: removed download {place / 'sha256-a'}: 3.0 MB\n" in capsys.readouterr().out


def test_a_journal_goes_when_its_server_has_all_of_it_and_never_before(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = anchors.journal_dir()
    with tracking.pipeline_run({}, {}) as run:
        run.flush()
        delivered = shutil.copytree(here / run.key, here.with_name("copy"))
    delivered.rename(here / run.key)  # as a kill right before its end leaves it
    writer = journal.Writer(here, "pipeline-0")
    start = {"op": "run", "name": "pipeline", "server": "http://nowhere", "start": 1, "parent": "", "tags": {}}
    writer.append(start)
    writer.close()
    (here / "broken-0").mkdir()
    (here / "broken-0" / journal.RECORDS).write_text("{\n")
    assert gc.main(["limits.disk_gb=0.000001"]) == 1
    assert {place.name for place in here.iterdir() if place.is_dir()} == {"pipeline-0", "broken-0"}
    said = capsys.readouterr().out
    assert "gc: 1 runs are not delivered to MLflow yet and stay" in said
    assert f"gc: {here / 'broken-0' / journal.RECORDS}: no record at byte 0" in said


def test_a_copy_that_is_being_made_is_not_disturbed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locks.in_turn(anchors.gc_lock()):
        assert gc.main([]) == 1
    assert f"process {os.getpid()} copies or removes these files: wait for it" in capsys.readouterr().err
    assert (checkout / "runs").is_dir()


@pytest.mark.parametrize("where", [LOCK, Path(".workspaces/failed.lock")])
def test_nothing_is_touched_while_a_run_lives(checkout: Path, where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locks.exclusive(checkout / where, ""):
        assert gc.main([]) == 1
    assert capsys.readouterr().err.startswith(f"gc: process {os.getpid()} runs the pipeline in {checkout}")
    assert (checkout / ".workspaces" / "failed").is_dir()
    assert (checkout / "runs").is_dir()


@pytest.mark.parametrize("tree", [".", ".workspaces/failed"])
def test_nothing_is_touched_while_a_stage_runs_without_a_flow(
    checkout: Path, tree: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _staging(checkout / tree, "train_ppo"):
        assert gc.main([]) == 1
        place = (checkout / tree).resolve()
        assert capsys.readouterr().err.startswith(f"gc: process {os.getpid()} runs train_ppo in {place}: wait")
        assert (checkout / ".workspaces" / "failed").is_dir()
        assert (checkout / "runs").is_dir()
    assert gc.main([]) == 0
