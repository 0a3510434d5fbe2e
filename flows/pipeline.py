"""Runs the whole pipeline: params, eight stages, summary.

    python -m flows.pipeline [group=choice ...] [key=value ...]

for example `scale=tiny reward=mixture ppo.kl.coef=0.02`. It writes params.yaml from `conf/` and these overrides;
`dvc repro` takes params.yaml as it is. This module is the command line, the flow is in pipeline_flow.py: wrong
params are refused before anything heavy is imported or started.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Sequence
from types import FrameType

from flows import servers
from rlhf import anchors, config, process
from rlhf.errors import UserError
from rlhf.tracking_server import quiet_mlflow


def main(arguments: Sequence[str]) -> int:
    """Runs the flow and prints what came out; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        config.check_sources(config.compose(arguments), anchors.CHECKOUT)
        print(_run(list(arguments)))
        return 0
    except UserError as error:
        return _stop(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _stop("interrupted: every stage that was done stays done, run it again to go on", 1)
    except Exception as error:
        return _stop(_unexpected(error), 1)


def _run(overrides: list[str]) -> str:
    start = time.monotonic()
    with servers.prefect_api() as wait_for_api:
        from flows.console import take_over
        from flows.pipeline_flow import pipeline
        from tasks.summary import as_text

        quiet_mlflow()  # loads while the server starts, on another core
        process.end_loading()
        console = take_over(sys.stdout)
        wait_for_api()
        try:
            summary = pipeline(overrides)
        finally:
            console.end_line()
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    return f"\nPipeline done in {minutes} min {seconds} s\n{as_text(summary)}"


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _unexpected(error: Exception) -> str:
    """Keeps the traceback of an unexpected error in a file and says where."""
    log = anchors.CHECKOUT / "runs" / "pipeline-error.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return f"{type(error).__name__}: {config.first_line(error)}: not expected, please report it with {log}"


def _stop(message: str, code: int) -> int:
    print(f"pipeline: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    process.start_loading()
    status = main(sys.argv[1:])
    process.leave_with(status)
    sys.exit(status)
