"""Workspaces of a small repository: what is in them, what they share, and when they are gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import anchors
from rlhf.errors import UserError
from rlhf.patches import changes
from tasks.workspaces import name_of, workspace


def git(place: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *identity, *arguments], cwd=place, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "check out"
    place.mkdir()
    git(place, "init", "--quiet")
    subprocess.run([sys.executable, "-m", "dvc", "init", "--quiet"], cwd=place, check=True)
    (place / "code.py").write_text("old\n")
    (place / "requirements.lock").write_text("one==1\n")
    (place / ".gitignore").write_text("/.workspaces/\n/.cache/\n")
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "--message", "first")
    (place / "code.py").write_text("new\n")
    git(place, "commit", "--quiet", "--all", "--message", "second")
    monkeypatch.setattr(anchors, "CHECKOUT", place)
    monkeypatch.setattr(anchors, "main_checkout", lambda: place)
    return place


def test_a_workspace_has_the_commit_and_the_main_checkouts_cache_and_goes_when_it_is_done(checkout: Path) -> None:
    with workspace("run") as made:
        assert made.path == checkout / ".workspaces" / "run"
        assert made.commit == git(checkout, "rev-parse", "HEAD") == git(made.path, "rev-parse", "HEAD")
        assert (made.path / "code.py").read_text() == "new\n"
        cache = [sys.executable, "-m", "dvc", "cache", "dir"]
        found = subprocess.run(cache, cwd=made.path, check=True, capture_output=True, text=True).stdout.strip()
        assert Path(found) == checkout / ".dvc" / "cache"
        assert changes(made.path) == b""
    assert [path.name for path in (checkout / ".workspaces").iterdir()] == ["sweep.lock"]
    assert git(checkout, "worktree", "list").count("\n") == 0


def test_an_older_revision_may_be_asked_for_and_needs_no_clean_checkout(checkout: Path) -> None:
    (checkout / "code.py").write_text("in work\n")
    with workspace("run", "HEAD~1") as made:
        assert (made.path / "code.py").read_text() == "old\n"
        assert made.patch is None
    with pytest.raises(UserError, match="^revision=nowhere: no commit"), workspace("run", "nowhere"):
        pass


def test_uncommitted_changes_are_refused_or_come_along(checkout: Path) -> None:
    (checkout / "code.py").write_text("in work\n")
    (checkout / "new file.bin").write_bytes(bytes(range(256)))
    (checkout / "params.yaml").write_text("what the pipeline writes: no change\n")
    with pytest.raises(UserError, match="uncommitted changes.*allow_dirty"), workspace("run"):
        pass
    assert not (checkout / ".workspaces").exists()
    with workspace("run", allow_dirty=True) as made:
        assert (made.path / "code.py").read_text() == "in work\n"
        assert (made.path / "new file.bin").read_bytes() == bytes(range(256))
        assert not (made.path / "params.yaml").exists()
        assert made.patch is not None
        assert "+in work" in made.patch.read_text()
        assert "params.yaml" not in made.patch.read_text()
    assert git(checkout, "diff", "--cached") == ""  # the user's index is as it was


def test_no_hook_of_the_checkout_runs_in_a_workspace(checkout: Path) -> None:
    hook = checkout / ".git/hooks/post-checkout"  # as `dvc install` makes one
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 3\n")
    hook.chmod(0o755)
    with workspace("run") as made:
        assert (made.path / "code.py").read_text() == "new\n"


def test_a_failed_runs_workspace_stays_until_the_run_is_tried_again(checkout: Path) -> None:
    left = checkout / ".workspaces" / "run" / "left"
    with pytest.raises(ZeroDivisionError), workspace("run"):
        left.write_text(str(1 / 0))
    left.touch()
    with workspace("run"):
        assert left.parent.exists()
        assert not left.exists()


def test_two_at_once_have_their_own_and_one_name_has_one_holder(checkout: Path) -> None:
    with workspace("one") as one, workspace("two") as two:
        assert one.path != two.path
        with pytest.raises(UserError, match="works in .*one: wait for it or stop it"), workspace("one"):
            pass
        assert (one.path / "code.py").exists()


def test_names_fit_into_a_path_and_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_of("nightly 2026-12-02T02:00 / ../x", "0123456789ab") == "nightly-2026-12-02T02-00-x-01234567"
    assert name_of("...", "0123456789ab") == "run-01234567"
    assert len(name_of("a" * 300, "0123456789ab")) < 100
    monkeypatch.setenv("HF_TOKEN", "open-sesame")
    assert name_of("try open-sesame now", "0123456789ab") == "try-now-01234567"
