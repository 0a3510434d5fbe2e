"""Runs the whole pipeline: params, eight stages, summary.

    python -m flows.pipeline [group=choice ...] [key=value ...]

for example `scale=tiny reward=mixture ppo.kl.coef=0.02`. It writes params.yaml from `conf/` and these overrides;
`dvc repro` takes params.yaml as it is. This module is the command line, the flow is in pipeline_flow.py: wrong
params are refused before anything heavy is imported or started.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Sequence

from flows import servers
from rlhf import anchors, config, locks, process
from rlhf.anchors import PIPELINE_LOCK as LOCK
from rlhf.errors import UsageError, run_command
from rlhf.tracking.server import quiet_mlflow
from tasks import disk
from tasks.supervisor import end_with_parent


def main(arguments: Sequence[str]) -> int:
    """Runs the flow and prints what came out; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    process.interrupt_on(signal.SIGTERM)
    interrupted = "interrupted: every stage that was done stays done, run it again to go on"
    return run_command("pipeline", lambda: _run(_overrides(arguments)), interrupted)


def _overrides(arguments: Sequence[str]) -> list[str]:
    """The overrides in the arguments; `--from-make TEXT` has them all in one text, quoted as for a shell."""
    match list(arguments):
        case ["--from-make", text]:
            end_with_parent()  # a make that is killed tells nobody
            try:
                return shlex.split(text)
            except ValueError as error:
                raise UsageError(f"overrides={text.strip()}: {error}: close every quotation") from None
        case overrides:
            return overrides


def _run(overrides: list[str]) -> None:
    raw = config.compose(overrides)
    params = config.validate(raw)
    config.check_sources(raw, anchors.CHECKOUT)
    start = time.monotonic()
    # Two at once in one checkout would train with each other's params.yaml.
    only_one = locks.exclusive(anchors.CHECKOUT / LOCK, "is running here: wait for it or stop it")
    with only_one, servers.prefect_api() as wait_for_api:
        print("starting: libraries and the Prefect server load first, from a cold disk for minutes ...", flush=True)
        from flows.console import take_over
        from flows.pipeline_flow import pipeline_in_place
        from tasks.summary import as_text

        disk.require_room(params.limits)
        quiet_mlflow()  # loads while the server starts, on another core
        process.end_loading()
        console = take_over(sys.stdout)
        wait_for_api()
        try:
            summary = pipeline_in_place(overrides)
        finally:
            console.end_line()
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(f"\nPipeline done in {minutes} min {seconds} s\n{as_text(summary)}")


if __name__ == "__main__":
    process.start_loading()
    status = main(sys.argv[1:])
    process.leave_with(status)
    sys.exit(status)
