"""The two ends of a short process: it loads thousands of modules, and leaves them behind, or is told to by a signal.

While libraries load, Python's collector walks over all of their objects again and again; when the process ends, Python
takes every one apart. Together that took a third of a stage's time beside its work.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from types import FrameType

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


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _leave() -> None:
    """Runs after every other function that was registered to run at exit; nothing but taking apart would follow."""
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)
