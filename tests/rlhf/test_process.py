"""The two ends of a process, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START = """
from rlhf import process
process.start_loading()
import atexit
atexit.register(print, "registered")

class Object:
    def __del__(self):
        print("taken apart")

kept = Object()
print("no line end", end=" ")
"""


def ended(script: str) -> tuple[int, str]:
    """Exit code and standard output of a script, which Python keeps in a buffer until the process ends."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_the_collector_rests_while_libraries_load():
    script = "process.start_loading(); import gc; print(gc.isenabled()); process.end_loading(); print(gc.isenabled())"
    assert ended(f"from rlhf import process; {script}") == (0, "False\nTrue\n")


def test_a_process_that_says_its_code_leaves_all_but_its_objects_in_order():
    assert ended(START + "process.leave_with(0)") == (0, "no line end registered\n")


def test_it_leaves_with_the_last_code_that_it_said():
    assert ended(START + "process.leave_with(0)\nprocess.leave_with(3)\nraise SystemExit(3)")[0] == 3


def test_a_process_that_says_nothing_ends_as_ever():
    assert ended(START) == (0, "no line end registered\ntaken apart\n")
