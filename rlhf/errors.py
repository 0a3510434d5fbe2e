"""Errors that a user can act on, and the one line in which every command tells of any error."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf.redaction import redact

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class UserError(Exception):
    """One line that names the parameter, file or server at fault, what is wrong with it, and what to do.

    A command prints the message alone and exits with `exit_code`: never a traceback. Secrets in it are masked.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(redact(message))


class Problems(UserError):
    """Several things that are wrong at once: a line each, and a last one that counts them."""

    def __init__(self, problems: Sequence[str], prefix: str = "") -> None:
        counted = [f"{len(problems)} problems, each on a line above"] if len(problems) > 1 else []
        self.problems = list(problems)
        super().__init__("\n".join(f"{prefix}{' '.join(line.splitlines())}" for line in [*problems, *counted]))


class UsageError(UserError):
    """The command line or the parameters are wrong: nothing was started."""

    exit_code = 2


def run_command(
    name: str,
    command: Callable[[], int | None],
    interrupted: str = "interrupted",
    speaks: Callable[[], bool] = lambda: True,
) -> int:
    """Runs a command line and returns its exit code; where it raises, standard error gets one line after `name`
    (one a problem, where there are several).

    `interrupted` is the line for Ctrl-C. Where `speaks` says no, another process tells of the same error. The traceback
    of an error that nobody expected goes to runs/NAME-error.log.
    """
    try:
        return command() or 0
    except Problems as error:
        lines, code = str(error).splitlines(), error.exit_code
    except UserError as error:
        lines, code = [str(error)], error.exit_code
    except KeyboardInterrupt:
        lines, code = [interrupted], 1
    except Exception as error:
        lines, code = [_disk_fault(error) or _unexpected(name, error)], 1
    for line in lines if speaks() else ():
        print(f"{name}: {redact(' '.join(line.splitlines()))}", file=sys.stderr, flush=True)
    return code


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's name if it has none."""
    return next((line.strip(" .") for line in str(error).splitlines() if line.strip(" .")), type(error).__name__)


def _disk_fault(error: Exception) -> str | None:
    """What to tell of an error that comes from a full or read-only disk; None for any other error.

    Libraries in Rust and C++ raise errors of their own, with the system's words for the cause.
    """
    if isinstance(error, OSError) and error.errno in (*DISK_FAULTS, errno.EACCES):
        fault: int | None = error.errno
    else:
        fault = next((number for number in DISK_FAULTS if os.strerror(number) in str(error)), None)
    if fault is None:
        return None
    place = getattr(error, "filename", None) or "the disk of this workspace"
    return f"{place}: {os.strerror(fault)}: make room or access there and run it again; nothing half-written is left"


def _unexpected(name: str, error: Exception) -> str:
    """Keeps the traceback of an unexpected error in a file and says where."""
    log = Path("runs") / f"{name}-error.log"
    try:
        log.parent.mkdir(exist_ok=True)
        log.write_text(redact("".join(traceback.format_exception(error))), encoding="utf-8")
    except OSError as fault:
        log = Path(f"no log ({fault.strerror})")
    return f"{type(error).__name__}: {first_line(error)}: not expected, please report it with {log}"
