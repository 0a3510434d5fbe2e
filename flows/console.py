"""What a person sees of a flow on the terminal: the stages' lines, and progress in place; no library's chatter."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TextIO

OWN = tuple(str(Path(__file__).resolve().parents[1] / house) for house in ("flows", "tasks"))
BAR = ("█", "░")
ERASE_LINE = "\r\x1b[2K"


class Console(logging.StreamHandler[TextIO]):
    """Shows what flows and tasks log, each line after its stage; on a terminal a progress line replaces the last."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._live = stream.isatty()
        self._in_place = False
        self.addFilter(lambda record: record.pathname.startswith(OWN))

    def format(self, record: logging.LogRecord) -> str:
        """The message after the name of the task that logs it; that name once, though stages write it too."""
        task = getattr(record, "task_run_name", "")
        return f"{task:20}{record.getMessage().removeprefix(f'{task}: ')}".rstrip()

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record; a progress line stays open for the next one to replace it."""
        line = self.format(record)
        before = ERASE_LINE if self._in_place else ""
        self._in_place = self._live and any(character in line for character in BAR)
        self.stream.write(before + line + ("" if self._in_place else "\n"))
        self.flush()

    def end_line(self) -> None:
        """Closes an open progress line."""
        if self._in_place:
            self.stream.write("\n")
            self._in_place = False


def take_over(stream: TextIO) -> Console:
    """Makes a console on `stream` the only handler of the root logger."""
    console = Console(stream)
    logging.getLogger().handlers[:] = [console]
    return console
