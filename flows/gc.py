"""Frees disk: workspaces of ended runs, DVC's cache of former runs, runs/, what killed stages left in .partial/.

    python -m flows.gc

DVC keeps what the checkout and its worktrees use now; older params are computed again. MLflow's runs, the registry and
training states stay. Nothing is touched while a pipeline runs anywhere in the repository, and none starts meanwhile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from rlhf import anchors, locks
from rlhf.anchors import PIPELINE_LOCK as LOCK
from rlhf.errors import UserError, run_command
from tasks import workspaces

BUSY = "runs the pipeline in {}: wait for it or stop it"


def main() -> int:
    """Sweeps; returns the exit code."""
    return run_command("gc", _sweep)


def _sweep() -> None:
    with ExitStack() as held:
        held.enter_context(locks.in_turn(workspaces.sweep_lock()))
        trees = worktrees()
        for tree in trees:
            if (tree / LOCK.parent).is_dir():
                held.enter_context(locks.exclusive(tree / LOCK, BUSY.format(tree)))
        ended = sorted(path for path in workspaces.directory().iterdir() if path.is_dir())
        for path in ended:
            held.enter_context(locks.exclusive(workspaces.lock_of(path), BUSY.format(path)))
        for path in ended:
            workspaces.remove(path)
            print(f"gc: removed {path}", flush=True)
        _sweep_cache([tree for tree in trees if tree.is_dir()])
        shutil.rmtree(anchors.CHECKOUT / "runs", ignore_errors=True)
        for left in abandoned(anchors.CHECKOUT):
            shutil.rmtree(left, ignore_errors=True)


def worktrees() -> list[Path]:
    """The checkout and the other worktrees of its repository; the checkout alone where there is no git."""
    listed = anchors.git("worktree", "list", "--porcelain", directory=anchors.CHECKOUT) or ""
    others = [Path(line.removeprefix("worktree ")) for line in listed.splitlines() if line.startswith("worktree ")]
    return [anchors.CHECKOUT, *(tree for tree in others if tree.resolve() != anchors.CHECKOUT)]


def abandoned(checkout: Path) -> list[Path]:
    """Directories STAGE-PROCESS-RANDOM in .partial/, anywhere in the checkout's top two levels, of ended processes."""
    found = [*checkout.glob(".partial/*-*-*"), *checkout.glob("*/.partial/*-*-*")]
    return [path for path in found if not _lives(path.name.split("-")[1])]


def _lives(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _sweep_cache(trees: list[Path]) -> None:
    """Drops from DVC's cache what no worktree uses."""
    checkout, *others = trees
    command = [sys.executable, "-m", "dvc", "gc", "--workspace", "--force"]
    command += [word for tree in others for word in ("-p", str(tree))]
    if code := subprocess.run(command, cwd=checkout, check=False).returncode:
        raise UserError(f"dvc gc ended with {code}: see above; runs/ was left alone")


if __name__ == "__main__":
    sys.exit(main())
