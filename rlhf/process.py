"""The two ends of a short process: it loads thousands of modules, and leaves them behind, or is told to by a signal.
One that runs under supervisors ends with them.

While libraries load, Python's collector walks over all of their objects again and again; when the process ends, Python
takes every one apart. Together that took a third of a stage's time beside its work.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import sys
import threading
from types import FrameType

SUPERVISORS_VARIABLE = "RLHF_SUPERVISORS"
"""The environment variable with the ids of the processes of which one has to be there, as in `tasks.supervisor`."""

_status: int | None = None


def start_loading() -> None:
    """Puts the collector off until `end_loading`; call it first of all, for what is registered first runs last."""
    gc.disable()
    atexit.register(_leave)


def end_loading() -> None:
    """Takes up collecting where it was put off, from now on without what is loaded, which stays to the end anyway."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def leave_with(status: int) -> None:
    """Says with which exit code the process is about to end, so that it may leave without taking itself apart."""
    global _status
    _status = status


def interrupt_on(*signals: signal.Signals) -> None:
    """Has these signals raise KeyboardInterrupt in the main thread, as Ctrl-C does."""
    for number in signals:
        signal.signal(number, _interrupt)


def end_with_supervisors() -> None:
    """Has this process killed as soon as none of the processes in RLHF_SUPERVISORS is left; Linux only.

    They end it themselves, unless both are killed at once. Their children's children hear nothing of that: DVC keeps
    pipes and signals from them.
    """
    above = os.environ.get(SUPERVISORS_VARIABLE, "").split()
    if above and hasattr(os, "pidfd_open"):
        threading.Thread(target=_outlive_nobody, args=([int(pid) for pid in above],), daemon=True).start()


def _outlive_nobody(above: list[int]) -> None:
    for pid in above:  # one that has ended waits to be collected, and is none that signals could tell from another
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        waiting = select.poll()
        waiting.register(watched, select.POLLIN)
        waiting.poll()
        os.close(watched)
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _leave() -> None:
    """Runs after every other function that was registered to run at exit; nothing but taking apart would follow."""
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)
