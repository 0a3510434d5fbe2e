"""Child processes that end with the flow: each runs under the supervisor, on a lifeline."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rlhf.environments import programs_of
from rlhf.redaction import redact
from tasks import supervisor

END_SECONDS = supervisor.GRACE_SECONDS + supervisor.DEPUTY_SECONDS + 5
"""How long the supervisor may take to end everything, and a little more."""


@dataclass(frozen=True)
class Terms:
    """On which terms the supervisor runs a command."""

    locks: Sequence[Path] = ()
    """Lock files to hold meanwhile, and to wait for."""
    holder: str = ""
    """What those who wait for them are told of the command."""
    limit: float = 0
    """Seconds that the command may take, not counted what it waited; 0 for no limit."""

    def arguments(self) -> list[str]:
        """The supervisor's command line."""
        locks = [argument for lock in self.locks for argument in ("--lock", str(lock))]
        return [*locks, f"--holder={self.holder}", f"--limit={self.limit}"]


def over_limit(stage: str, terms: Terms) -> str:
    """What to tell of a command that was ended at the time limit of `stage`."""
    over = f"limits.{stage}_seconds={terms.limit:.0f}: it took longer and was ended"
    return f"{over}: raise the limit, or set it to 0 for none"


def without_a_word(code: int) -> str:
    """What to tell of a command that failed and said nothing."""
    return f"exit code {code} without a word"


@contextmanager
def supervised(
    command: Sequence[str],
    *,
    directory: Path,
    environ: Mapping[str, str],
    output: int | IO[str] = subprocess.PIPE,
    terms: Terms = Terms(),
) -> Iterator[subprocess.Popen[str]]:
    """Runs `command` in `directory`, standard error joined to standard output; on leaving, all of it has ended.

    `environ` is laid over this process's environment. Leaving by an exception, Ctrl-C and a cancelled run included,
    ends the command with all its descendants: TERM, then KILL. Should this process be killed, the supervisor does it.
    """
    process = subprocess.Popen(
        [sys.executable, supervisor.__file__, *terms.arguments(), "--", *command],
        cwd=directory,
        env=child_environment(environ),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # Closes the lifeline, and drops what is still written so that nobody waits for a full pipe to drain.
        process.communicate(timeout=END_SECONDS)


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `environ` on top, in which `python` is this interpreter and prints at once."""
    return {**os.environ, **programs_of(Path(sys.executable)), "PYTHONUNBUFFERED": "1", **environ}


def run_lines(
    command: Sequence[str],
    on_line: Callable[[str], None],
    *,
    directory: Path,
    environ: Mapping[str, str],
    terms: Terms = Terms(),
) -> int:
    """Runs `command` to its end, gives each line of its output to `on_line` as it comes, and returns the exit code.

    Secrets in the lines are masked.
    """
    with supervised(command, directory=directory, environ=environ, terms=terms) as process:
        assert process.stdout is not None
        for line in process.stdout:
            on_line(redact(line.rstrip()))
        return process.wait()
