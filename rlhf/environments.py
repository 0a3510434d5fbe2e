"""The Python of a workspace: the running one, or one of its own where its lock file names other packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from rlhf import anchors

LOCK_FILE = "requirements.lock"
PLACE = Path(".venv")
DONE = PLACE / ".installed"
"""Written when all is installed."""


def make(workspace: Path, run: Callable[[list[str]], None]) -> Path:
    """The workspace's Python, for which an environment is made there if it locks other packages than this checkout.

    `run` runs a command in the workspace and raises where it fails; the environment is then made anew the next time.
    """
    wanted, running = workspace / LOCK_FILE, anchors.CHECKOUT / LOCK_FILE
    if not wanted.is_file() or wanted.read_bytes() == running.read_bytes():
        return Path(sys.executable)
    python = _python(workspace)
    if not (workspace / DONE).is_file():
        uv = [sys.executable, "-m", "uv"]
        run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(PLACE)])
        run([*uv, "pip", "sync", "--quiet", "--python", str(python), "--require-hashes", LOCK_FILE])
        (workspace / DONE).touch()
    return python


def interpreter(workspace: Path) -> Path:
    """The Python of the stages in a workspace: its own environment's where it has one, or else the running one."""
    own = _python(workspace)
    return own if workspace != anchors.CHECKOUT and own.exists() else Path(sys.executable)


def programs_of(python: Path) -> dict[str, str]:
    """The variable by which a child process finds `python` and what is installed beside it first."""
    return {"PATH": os.pathsep.join((str(python.parent), os.environ.get("PATH", os.defpath)))}


def _python(workspace: Path) -> Path:
    return workspace / PLACE / "bin" / "python"
