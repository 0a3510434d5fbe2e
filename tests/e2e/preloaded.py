"""Stages as processes of their own, forked from one that has the libraries loaded: a start costs no ten seconds.

What is forked has run nothing yet. From there on it is `python -m stages.NAME` in its workspace, with the code of this
checkout.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.e2e import workspaces

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "hydra",
        "mlflow.store.tracking.sqlalchemy_store",
        "omegaconf",
        "rlhf.ppo.setup",
        "rlhf.ppo.state",
        "rlhf.stage",
        "rlhf.tracking",
        "transformers.conversion_mapping",
        "transformers.models.llama.modeling_llama",
    ]
)


@dataclass(frozen=True)
class Child:
    """A stage that was started; `log` is what it prints."""

    process: ForkServerProcess
    log: Path

    def end(self) -> int:
        """Waits for the exit code, negative where a signal ended it."""
        self.process.join(workspaces.PATIENCE_SECONDS)
        code = self.process.exitcode
        assert code is not None, self.log.read_text()
        return code

    def kill_after(self, seconds: float) -> int:
        """Kills it `seconds` from now, if it still runs then; the exit code."""
        time.sleep(seconds)
        self.process.kill()
        return self.end()


def start(stage: str, place: Path, environ: Mapping[str, str], *overrides: str) -> Child:
    """Starts a stage in the workspace `place`."""
    log = place / f"{stage}.log"
    process = FORKS.Process(target=_run, args=(stage, place, dict(environ), log, overrides))
    process.start()
    return Child(process, log)


def succeed(stage: str, place: Path, environ: Mapping[str, str]) -> str:
    """Runs a stage and returns what it printed."""
    child = start(stage, place, environ)
    assert child.end() == 0, child.log.read_text()
    return child.log.read_text()


def _run(stage: str, place: Path, environ: dict[str, str], log: Path, overrides: tuple[str, ...]) -> None:
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environ)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [stage, *overrides]
    runpy.run_module(f"stages.{stage}", run_name="__main__", alter_sys=True)
