"""One entry point a DVC stage."""

import os
import signal
import sys

from rlhf import process  # before torch: rlhf sets what torch reads when it is loaded


def _stop_loading(_number: int, _frame: object) -> None:
    """Ends a stage at once: an exception inside a library that is loading would come out as a page of its lines."""
    if "LOCAL_RANK" in os.environ:  # one of several processes: whoever started it says so
        os._exit(128 + signal.SIGTERM)
    os.write(sys.stderr.fileno(), f"{_RUNNING[0]}: interrupted while loading: nothing was written\n".encode())
    os._exit(1)


# `python -m stages.NAME` loads libraries for seconds before `run_stage` listens to signals.
_RUNNING = [word.removeprefix("stages.") for word in sys.orig_argv if word.startswith("stages.")]
if _RUNNING and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop_loading)
    signal.signal(signal.SIGTERM, _stop_loading)
if _RUNNING:
    process.start_loading()
    process.end_with_supervisors()
