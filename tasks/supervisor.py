"""Runs one command so that nothing of it outlives the flow.

    python -m tasks.supervisor [--grace SECONDS] [--limit SECONDS] [--lock FILE ...] -- COMMAND [ARGUMENT ...]

The flow starts this in a session of its own and holds the other end of its standard input: the lifeline. When that
closes, because the flow wants to stop or because it was killed, every process below is told to end (TERM) and, after
the grace time, made to (KILL). The kernel closes the pipe of a killed flow, so even SIGKILL leaves nothing running.

The supervisor holds the lock files while anything below it runs, and waits for them first. It runs the command through
a deputy: itself a second time, on a lifeline of its own, with the locks' descriptors. Whichever of the two is killed,
the other ends the command, and only then does the kernel free the locks. The command has the descriptors as well.
Should both be killed at once, the kernel tells the command to end, and the stages below it, which are told the ids of
both (RLHF_SUPERVISORS), end themselves: `rlhf/process.py`.

On Linux the supervisor adopts orphans (prctl(2), PR_SET_CHILD_SUBREAPER), so processes that left the command's
session are found as well; elsewhere the command's process group is ended. Standard library only: it starts at once.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
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
from typing import IO

GRACE_SECONDS = 10.0
DEPUTY_SECONDS = 5.0
"""How long beyond the grace time the deputy may take to end everything."""
POLL_SECONDS = 0.05
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SUPERVISORS_VARIABLE = "RLHF_SUPERVISORS"
"""The environment variable with the ids of the processes of which one has to be there, as in `rlhf.process`."""
NOT_FOUND, TIMED_OUT, STOPPED = 127, 124, 128 + signal.SIGTERM
OWN_LINE = "supervisor: "
"""What each line of the supervisor's own begins with."""
LINUX = sys.platform == "linux"


class Supervisor:
    """One command and all processes below it."""

    def __init__(self, lifeline: int, grace: float = GRACE_SECONDS) -> None:
        self._grace = grace
        self._stop = False
        self._pid = 0
        self._status: int | None = None
        if LINUX:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(_wake_on_signals(self._on_signal), selectors.EVENT_READ)
        self._selector.register(lifeline, selectors.EVENT_READ)

    def hold(self, locks: Sequence[Path], holder: str) -> list[int] | None:
        """Takes the lock files one after the other and writes into each that `holder` has it.

        While another process has one, says which. All who take several take them in the same order, so nobody waits
        for somebody who waits for them. Returns the descriptors; None where this process was told to stop meanwhile.
        """
        held = []
        for lock in locks:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
            if not self._wait_for(descriptor, lock.stem):
                return None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()}{holder and f' ({holder})'}".encode(), 0)
            held.append(descriptor)
        return held

    def _wait_for(self, descriptor: int, name: str) -> bool:
        told, start = None, time.monotonic()
        while not self._stop:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._wait(POLL_SECONDS)  # a new holder writes its name only now
                holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
                if holder != told:
                    _say(f"waiting for device {name}, which {holder} holds")
                    told = holder
            else:
                if told:
                    _say(f"device {name} is free after {time.monotonic() - start:.0f} s")
                return True
        return False

    def run(self, command: Sequence[str], held: Sequence[int], limit: float = 0, through_deputy: bool = False) -> int:
        """Runs `command` until it ends, a signal comes, the lifeline closes or `limit` seconds are over (0: no limit).

        Then ends what is left. `held` are descriptors that stay open in the command. Returns the command's exit code,
        128 + n where signal n ended it, STOPPED where it was stopped from here, and TIMED_OUT.
        """
        # The command reads nothing; to a deputy its standard input is the lifeline.
        stdin = subprocess.PIPE if through_deputy else subprocess.DEVNULL
        above = "" if through_deputy else os.environ.get(SUPERVISORS_VARIABLE, "")
        child = subprocess.Popen(
            command,
            stdin=stdin,
            start_new_session=True,
            pass_fds=held,
            env={**os.environ, SUPERVISORS_VARIABLE: f"{above} {os.getpid()}".strip()},
            preexec_fn=None if through_deputy else end_with_parent,  # safe here: this process has one thread
        )
        self._pid = child.pid
        deadline = time.monotonic() + limit if limit else None
        in_time = True
        while self._status is None and not self._stop and in_time:
            in_time = self._wait_until(deadline)
        ended_by_itself = self._status is not None
        if child.stdin and not ended_by_itself:
            self._have_the_deputy_end_all(child.stdin)
        self._end_all(self._grace)
        code = os.waitstatus_to_exitcode(self._status or 0)
        child.returncode = code  # Popen is not to wait for a process that is reaped
        if ended_by_itself:
            return code if code >= 0 else 128 - code
        return STOPPED if in_time else TIMED_OUT

    def _wait_until(self, deadline: float | None) -> bool:
        """Waits for the next thing to happen; false once the deadline is over."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        self._wait(left)
        return True

    def _wait(self, seconds: float | None) -> None:
        """Waits for a signal or the lifeline's end, `seconds` at most, and collects who has ended."""
        for key, _ in self._selector.select(seconds):
            end_of_file = not os.read(key.fd, 4096)
            self._stop |= end_of_file
            if end_of_file:
                self._selector.unregister(key.fd)
        self._reap()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stop |= number != signal.SIGCHLD

    def _reap(self) -> None:
        """Collects every ended child, adopted orphans too, and keeps the command's status."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._status = status

    def _have_the_deputy_end_all(self, lifeline: IO[bytes]) -> None:
        """Leaves TERM and KILL to the deputy, so that no process is told twice; one that does not manage is killed."""
        lifeline.close()
        deadline = time.monotonic() + self._grace + DEPUTY_SECONDS
        while self._status is None and self._wait_until(deadline):
            pass
        if self._status is None:
            self._signal_all(signal.SIGKILL)

    def _end_all(self, grace: float) -> None:
        """TERM, and KILL once the grace time is over, until no process is left."""
        deadline = time.monotonic() + grace
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
            os.killpg(self._pid, 0)
            return True
        return False

    def _signal_all(self, number: signal.Signals) -> None:
        if not LINUX:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, number)
            return
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def end_with_parent() -> None:
    """Has the kernel send this process SIGTERM when its parent is gone (prctl(2)); Linux only, elsewhere nothing."""
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


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


def _say(line: str) -> None:
    print(f"{OWN_LINE}{line}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tasks.supervisor", description="Runs COMMAND on a lifeline.")
    parser.add_argument("--grace", type=float, default=GRACE_SECONDS, help="seconds between TERM and KILL")
    parser.add_argument("--limit", type=float, default=0, help="seconds that the command may take; 0 for no limit")
    parser.add_argument("--lock", type=Path, action="append", default=[], help="a file to hold the lock of meanwhile")
    parser.add_argument("--holder", default="", help="what to call the command to those who wait for a lock")
    parser.add_argument("--deputy-with", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args(arguments)
    supervisor = Supervisor(sys.stdin.fileno(), options.grace)
    try:
        if options.deputy_with is not None:
            return supervisor.run(options.command, options.deputy_with)
        held = supervisor.hold(sorted(options.lock), options.holder)
        if held is None:
            return STOPPED
        own = ["--grace", str(options.grace), "--deputy-with", *map(str, held)]
        deputy = [sys.executable, __file__, *own, "--", *options.command]
        return supervisor.run(deputy, held, options.limit, through_deputy=True)
    except OSError as error:
        print(f"{OWN_LINE}{error.filename}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
