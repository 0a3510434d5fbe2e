"""Runs one command so that nothing of it outlives the flow.

    python -m tasks.supervisor [--grace SECONDS] -- COMMAND [ARGUMENT ...]

The flow starts this in a session of its own and holds the other end of its standard input: the lifeline. When that
closes, because the flow wants to stop or because it was killed, every process below is told to end (TERM) and, after
the grace time, made to (KILL). The kernel closes the pipe of a killed flow, so even SIGKILL leaves nothing running.

On Linux the supervisor adopts orphans (prctl(2), PR_SET_CHILD_SUBREAPER), so processes that left the command's
session are found as well; elsewhere the command's process group is ended. Standard library only: it starts at once.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

GRACE_SECONDS = 10.0
POLL_SECONDS = 0.05
PR_SET_CHILD_SUBREAPER = 36
NOT_FOUND = 127
LINUX = sys.platform == "linux"


class Supervisor:
    """One command and all processes below it."""

    def __init__(self, command: Sequence[str], grace: float = GRACE_SECONDS) -> None:
        self._grace = grace
        self._stop = False
        self._status: int | None = None
        if LINUX:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._wake = _wake_on_signals(self._on_signal)
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def run(self, lifeline: int) -> int:
        """Waits for the command, a signal, or end-of-file on the descriptor `lifeline`; then ends what is left.

        Returns the command's exit code, 128 + n where signal n ended it, and 128 + TERM where it was stopped from here.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(lifeline, selectors.EVENT_READ)
            while self._status is None and not self._stop:
                for key, _ in selector.select():
                    end_of_file = not os.read(key.fd, 4096)
                    self._stop |= end_of_file
                self._reap()
        stopped = self._status is None
        self._end_all()
        code = os.waitstatus_to_exitcode(self._status or 0)
        self._child.returncode = code  # Popen is not to wait for a process that is reaped
        if stopped:
            return 128 + signal.SIGTERM
        return code if code >= 0 else 128 - code

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stop |= number != signal.SIGCHLD

    def _reap(self) -> None:
        """Collects every ended child, adopted orphans too, and keeps the command's status."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child.pid:
                    self._status = status

    def _end_all(self) -> None:
        """TERM, and KILL once the grace time is over, until no process is left."""
        deadline = time.monotonic() + self._grace
        self._signal_all(signal.SIGTERM)
        while True:
            self._reap()
            if not self._anything_left():
                return
            if time.monotonic() >= deadline:
                self._signal_all(signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _anything_left(self) -> bool:
        if LINUX:
            return bool(descendants(os.getpid()))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, 0)
            return True
        return False

    def _signal_all(self, number: signal.Signals) -> None:
        if not LINUX:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, number)
            return
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, parents before children, from /proc (Linux)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # "pid (name) state parent ...": the name may itself hold spaces and brackets
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, []))
    for known in found:
        found.extend(children.get(known, []))
    return found


def _wake_on_signals(handler: Callable[[int, FrameType | None], None]) -> int:
    """Installs `handler` and returns a descriptor that becomes readable with every signal."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)
    return read_end


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tasks.supervisor", description="Runs COMMAND on a lifeline.")
    parser.add_argument("--grace", type=float, default=GRACE_SECONDS, help="seconds between TERM and KILL")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args(arguments)
    try:
        supervisor = Supervisor(options.command, options.grace)
    except OSError as error:
        print(f"supervisor: {options.command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND
    return supervisor.run(sys.stdin.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
