"""The two ends of a process, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import process
from tasks import supervisor

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


BELOW = """
import itertools, time
from rlhf import process
process.end_with_supervisors()
for _ in itertools.count():
    print("up", flush=True)
    time.sleep(0.05)
"""


def below(*supervisors: int) -> subprocess.Popen[str]:
    environ = {**os.environ, process.SUPERVISORS_VARIABLE: " ".join(map(str, supervisors))}
    return subprocess.Popen([sys.executable, "-c", BELOW], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(not supervisor.LINUX, reason="only Linux tells a process that another is gone")
@pytest.mark.parametrize("first", [0, 1])
def test_a_process_lives_as_long_as_one_of_its_supervisors(first):
    """The killed are left uncollected: who would collect them may itself wait for the process."""
    above = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    with below(*(one.pid for one in above)) as child:
        above[first].kill()
        assert [child.stdout.readline() for _ in range(20)] == ["up\n"] * 20
        above[1 - first].kill()
        assert child.wait() == -signal.SIGKILL
    for one in above:
        one.wait()
    with below(*(one.pid for one in above)) as late:
        assert late.wait() == -signal.SIGKILL


def test_it_is_told_of_them_by_the_supervisor():
    assert process.SUPERVISORS_VARIABLE == supervisor.SUPERVISORS_VARIABLE
    script = f"import os; print(os.environ['{process.SUPERVISORS_VARIABLE}'], os.getppid())"
    command = [sys.executable, supervisor.__file__, "--", sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        first, deputy, parent = started.stdout.readline().split()
        assert (int(first), deputy) == (started.pid, parent)
