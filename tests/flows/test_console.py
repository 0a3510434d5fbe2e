"""What the terminal shows of log records."""

from __future__ import annotations

import io
import logging
from pathlib import Path

from flows import console
from flows.console import ERASE_LINE, Console

OURS = str(Path(console.__file__).parents[1] / "tasks" / "dvc_stages.py")
THEIRS = logging.__file__


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, *messages: str, path: str = OURS, task: str = "train_ppo") -> str:
    shown = Console(stream)
    for message in messages:
        record = logging.LogRecord("prefect.task_runs", logging.INFO, path, 1, message, None, None)
        record.task_run_name = task
        shown.handle(record)
    shown.end_line()
    return stream.getvalue()


def test_a_line_comes_after_its_stage_whose_name_is_not_repeated() -> None:
    shown = show(io.StringIO(), "loading", "train_ppo: done")
    assert shown == f"{'train_ppo':20}loading\n{'train_ppo':20}done\n"


def test_a_message_without_a_task_is_shown_too() -> None:
    assert show(io.StringIO(), "hello", task="") == f"{'':20}hello\n"


def test_what_libraries_log_is_not_shown() -> None:
    assert show(io.StringIO(), "Finished in state Completed()", path=THEIRS) == ""


def test_in_a_log_every_progress_line_stays() -> None:
    assert show(io.StringIO(), "██░░ 1/2", "████ 2/2").count("\n") == 2


def test_on_a_terminal_progress_is_replaced_and_the_last_line_closed() -> None:
    name = f"{'train_ppo':20}"
    shown = show(Terminal(), "██░░ 1/2", "████ 2/2", "done", "░░░░ 0/9")
    expected = f"{name}██░░ 1/2{ERASE_LINE}{name}████ 2/2{ERASE_LINE}{name}done\n{name}░░░░ 0/9\n"
    assert shown == expected
