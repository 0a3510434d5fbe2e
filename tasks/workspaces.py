"""A workspace of its own for a deployment's run: a git worktree at one commit, with what all workspaces share.

    .workspaces/NAME        the worktree, a detached HEAD
    .workspaces/NAME.lock   held by the flow run that works there: the kernel frees it however that run ends

DVC's cache is the main checkout's, and so are training state and tracking (`rlhf.anchors`): what one workspace has
made, the next one restores, and what it has begun, the next one resumes. So nothing is lost with a workspace but what
a failed stage left for people to look at (`runs/`): then it is kept, until `make gc`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhf import anchors, locks
from rlhf.errors import UserError
from rlhf.patches import changes
from rlhf.redaction import redact

DIRECTORY = ".workspaces"
DVC_CACHE = [sys.executable, "-m", "dvc", "cache", "dir"]
LONGEST_NAME = 80


@dataclass(frozen=True)
class Workspace:
    """Where one run of the pipeline works."""

    path: Path
    commit: str = ""
    """The commit checked out; empty for a checkout that the pipeline runs in place."""

    @property
    def patch(self) -> Path | None:
        """Uncommitted changes on top of the commit, of which nothing becomes champion; None where there are none."""
        patch = self.path / anchors.UNCOMMITTED
        return patch if self.commit and patch.is_file() else None


def directory() -> Path:
    """Where the workspaces of this repository are."""
    return anchors.main_checkout() / DIRECTORY


@contextmanager
def workspace(name: str, revision: str = "HEAD", allow_dirty: bool = False) -> Iterator[Workspace]:
    """A workspace at `revision` of this checkout's repository, removed on leaving unless by an exception.

    With `allow_dirty`, this checkout's uncommitted changes come on top. Raises UserError where there are any without
    it, where the revision is unknown, and where another process works in a workspace of that name.
    """
    commit = resolve(revision)
    diff = changes(anchors.CHECKOUT) if revision == "HEAD" else b""
    if diff and not allow_dirty:
        raise UserError(
            f"{anchors.CHECKOUT}: uncommitted changes, which no run could be made of again: commit them, or run with "
            "allow_dirty, which records them and makes no champion"
        )
    path = directory() / name
    with ExitStack() as held:
        with locks.in_turn(sweep_lock(), "frees disk (make gc)"):  # a sweep that has begun is waited for
            held.enter_context(locks.exclusive(lock_of(path), f"works in {path}: wait for it or stop it"))
        remove(path)
        _git("worktree", "add", "--quiet", "--detach", "--force", str(path), commit)
        if diff:
            patch = path / anchors.UNCOMMITTED
            patch.parent.mkdir(exist_ok=True)
            patch.write_bytes(diff)
            _git("apply", "--whitespace=nowarn", str(patch), directory=path)
        _share_cache(path)
        yield Workspace(path, commit)
        remove(path)
        lock_of(path).unlink(missing_ok=True)


def cache_dir() -> Path:
    """The DVC cache that all workspaces share; raises UserError where DVC knows none."""
    return Path(_run(DVC_CACHE, anchors.main_checkout()).decode().strip())


def lock_of(path: Path) -> Path:
    """The lock file that the run in a workspace holds."""
    return path.with_name(f"{path.name}.lock")


def sweep_lock() -> Path:
    """The lock file that is held while workspaces are swept, and for a moment by each run that begins."""
    return directory() / "sweep.lock"


def name_of(flow_run: str, identity: str) -> str:
    """A directory's name for the flow run: its name as far as a path may hold it, masked, and the start of its id."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", redact(flow_run)).strip("-")
    return f"{words[:LONGEST_NAME] or 'run'}-{identity[:8]}"


def resolve(revision: str) -> str:
    """The commit that `revision` names in this checkout's repository; raises UserError where there is none."""
    if anchors.git("rev-parse", "--git-dir", directory=anchors.CHECKOUT) is None:
        raise UserError(f"{anchors.CHECKOUT}: no git repository, and a run of its own needs one: clone it, or make run")
    arguments = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    commit = anchors.git(*arguments, directory=anchors.CHECKOUT)
    if not commit:
        raise UserError(f"revision={revision}: no commit of this repository: git fetch, or take another")
    return commit


def remove(path: Path) -> None:
    """Removes a workspace, whatever state it is in."""
    shutil.rmtree(path, ignore_errors=True)
    _git("worktree", "prune")


def _share_cache(path: Path) -> None:
    """Has DVC use the main checkout's cache in the workspace; `.dvc/config.local` is the one file that git leaves."""
    _run([*DVC_CACHE, "--local", str(cache_dir())], path)


def _git(*arguments: str, directory: Path | None = None) -> None:
    _run(["git", *arguments], directory or anchors.CHECKOUT)


def _run(command: list[str], directory: Path) -> bytes:
    """Standard output of a command; raises UserError with its last words where it fails."""
    env = anchors.git_environment()
    process = subprocess.run(
        command, check=False, cwd=directory, env=env, stdin=subprocess.DEVNULL, capture_output=True
    )
    if process.returncode:
        said = process.stderr.decode(errors="replace").split("\n")
        reason = next((line.strip() for line in reversed(said) if line.strip()), f"exit code {process.returncode}")
        raise UserError(f"{' '.join(command[:3])} in {directory}: {reason}")
    return process.stdout
