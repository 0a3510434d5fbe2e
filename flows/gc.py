"""Frees disk: workspaces of ended runs, DVC's cache of former runs, runs/, what killed stages left in .partial/.

    python -m flows.gc [limits.disk_gb=20]

DVC keeps what the checkout and its worktrees use now; older params are computed again. Where more than `limits.disk_gb`
is taken then, it gives up, until it is not, first what belongs to nothing any more, then, the oldest first, training
states and artifacts of runs that no registered version leads to. Registered versions and points that MLflow does not
have yet stay. Nothing is touched while a pipeline or a stage runs anywhere in the repository, and no pipeline starts
meanwhile.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

from rlhf import anchors, config, locks
from rlhf.anchors import PIPELINE_LOCK as LOCK
from rlhf.errors import UserError, run_command
from rlhf.params import Limits
from rlhf.registry.leftovers import Leftover, leftovers
from rlhf.tracking import journal
from tasks import disk, workspaces

BUSY = "runs the pipeline in {}: wait for it or stop it"


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    return run_command("gc", lambda: _sweep(config.load(arguments, anchors.CHECKOUT / config.PARAMS_FILE).limits))


def _sweep(limits: Limits) -> None:
    with ExitStack() as held:
        held.enter_context(locks.exclusive(anchors.gc_lock(), "copies or removes these files: wait for it"))
        held.enter_context(locks.in_turn(workspaces.sweep_lock()))
        trees = worktrees()
        for tree in trees:
            if (tree / LOCK.parent).is_dir():
                held.enter_context(locks.exclusive(tree / LOCK, BUSY.format(tree)))
            for place in staged(tree):
                stage = f"runs {place.name.partition('-')[0]} in {tree}: wait for it or stop it"
                held.enter_context(locks.exclusive(anchors.stage_lock(place), stage))
        ended = sorted(path for path in workspaces.directory().iterdir() if path.is_dir())
        for path in ended:
            held.enter_context(locks.exclusive(workspaces.lock_of(path), BUSY.format(path)))
        for path in ended:
            workspaces.remove(path)
            _say(f"removed {path}")
        _sweep_cache([tree for tree in trees if tree.is_dir()])
        shutil.rmtree(anchors.CHECKOUT / "runs", ignore_errors=True)
        for left in staged(anchors.CHECKOUT):
            shutil.rmtree(left, ignore_errors=True)
        _sweep_journals()
        if limits.disk_gb:
            _keep_within(limits.disk_gb)


def worktrees() -> list[Path]:
    """The checkout and the other worktrees of its repository; the checkout alone where there is no git."""
    listed = anchors.git("worktree", "list", "--porcelain", directory=anchors.CHECKOUT) or ""
    others = [Path(line.removeprefix("worktree ")) for line in listed.splitlines() if line.startswith("worktree ")]
    return [anchors.CHECKOUT, *(tree for tree in others if tree.resolve() != anchors.CHECKOUT)]


def staged(tree: Path) -> list[Path]:
    """What stages have begun to write and not put in place: STAGE-RANDOM in .partial/, in a tree's top two levels."""
    return [*tree.glob(".partial/*-*"), *tree.glob("*/.partial/*-*")]


def _sweep_cache(trees: list[Path]) -> None:
    """Drops from DVC's cache what no worktree uses."""
    checkout, *others = trees
    command = [sys.executable, "-m", "dvc", "gc", "--workspace", "--force"]
    command += [word for tree in others for word in ("-p", str(tree))]
    if code := subprocess.run(command, cwd=checkout, check=False).returncode:
        raise UserError(f"dvc gc ended with {code}: see above; runs/ was left alone")


def _sweep_journals() -> None:
    """Removes the journals that their server has all of; what it does not have yet stays, and so do broken ones."""
    left = 0
    for found in journal.waiting(anchors.journal_dir()):
        try:
            left += not found.remove(journal.destination(found))
        except UserError as error:
            _say(str(error))
    if left:
        _say(f"{left} runs are not delivered to MLflow yet and stay: python -m rlhf.tracking flush")


def _keep_within(budget_gb: float) -> None:
    """Gives up what may be given up until no more than the budget is taken; raises UserError where that is not enough.

    What somebody has deleted in MLflow goes first, then the oldest.
    """
    taken = sum(disk.used().values())
    if taken > budget_gb * disk.GB:
        for found in sorted(
            [*leftovers(), *states(), *downloads()], key=lambda found: (not found.is_waste, found.since)
        ):
            if taken <= budget_gb * disk.GB:
                break
            freed = disk.size(found.path)
            found.remove()
            taken -= freed
            _say(f"removed {found.what}: {freed / 1e6:.1f} MB")
    said = disk.in_words(now := disk.used())
    if sum(now.values()) > budget_gb * disk.GB:
        keeps = "registered versions and what the checkouts use stay"
        raise UserError(f"limits.disk_gb={budget_gb:g}: {said}, and {keeps}: raise it, or delete versions in MLflow")
    _say(f"{said}, of limits.disk_gb={budget_gb:g}")


def states() -> Iterator[Leftover]:
    """Training states that nobody trains on: a run that was stopped would go on from them."""
    for place in anchors.state_dir().glob("*/*/"):
        try:
            with _unused(place):
                written = [path.stat().st_mtime for path in place.iterdir() if path != anchors.state_lock(place)]
        except UserError:
            continue
        yield Leftover(f"training state {place}", place, max(written, default=0), False, partial(_remove_state, place))


def downloads() -> Iterator[Leftover]:
    """Fetched checkpoints, whole or not, that nobody fetches now: whoever needs one fetches it again."""
    for path in anchors.downloads_dir().glob("*"):
        if path.suffix != ".lock":
            yield Leftover(f"download {path}", path, path.stat().st_mtime, False, partial(_remove_download, path))


def _remove_download(path: Path) -> None:
    with locks.exclusive(path.with_name(f"{path.name.removesuffix('.part')}.lock"), f"fetches {path}: wait for it"):
        path.unlink(missing_ok=True)


def _remove_state(place: Path) -> None:
    with _unused(place):
        shutil.rmtree(place, ignore_errors=True)


def _unused(state: Path) -> AbstractContextManager[None]:
    """Keeps stages from training on a state; raises UserError where one does."""
    return locks.exclusive(anchors.state_lock(state), f"is training on {state}: wait for it or stop it")


def _say(line: str) -> None:
    print(f"gc: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
