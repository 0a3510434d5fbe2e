"""Children on a lifeline: lines as they come, the exit code, and nothing left after an interruption."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.processes import run_lines, supervised
from tasks.supervisor import LINUX
from tests.tasks.test_supervisor import is_running, wait_until


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_lines_of_both_streams_come_in_order_with_the_exit_code(tmp_path: Path) -> None:
    script = "import sys; print('one  '); print('two', file=sys.stderr); print('three'); sys.exit(3)"
    lines: list[str] = []
    assert run_lines(python(script), lines.append, directory=tmp_path, environ={}) == 3
    assert lines == ["one", "two", "three"]


def test_a_line_arrives_before_the_command_ends(tmp_path: Path) -> None:
    script = "import pathlib, time; print('go')\nwhile not pathlib.Path('seen').exists(): time.sleep(0.05)"
    code = run_lines(python(script), lambda _: (tmp_path / "seen").touch(), directory=tmp_path, environ={})
    assert code == 0


def test_bytes_that_are_no_text_do_not_stop_the_stage(tmp_path: Path) -> None:
    lines: list[str] = []
    script = r"import sys; sys.stdout.buffer.write(b'caf\xe9\n')"
    assert run_lines(python(script), lines.append, directory=tmp_path, environ={}) == 0
    assert lines == ["caf\ufffd"]


def test_python_is_this_interpreter_and_variables_reach_the_child(tmp_path: Path) -> None:
    lines: list[str] = []
    show = 'import os, sys; print(sys.prefix); print(os.environ["GIVEN"]); print(os.getcwd())'
    code = run_lines(["sh", "-c", f"python -c '{show}'"], lines.append, directory=tmp_path, environ={"GIVEN": "x"})
    assert code == 0
    assert lines == [sys.prefix, "x", str(tmp_path)]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interruption_ends_the_command(tmp_path: Path, interruption: type[BaseException]) -> None:
    pids: list[int] = []

    def on_line(line: str) -> None:
        pids.append(int(line))
        raise interruption

    with pytest.raises(interruption):
        run_lines(
            python("import os, time; print(os.getpid()); time.sleep(600)"), on_line, directory=tmp_path, environ={}
        )
    assert len(pids) == 1
    assert ended(pids[0])


def test_leaving_ends_a_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = python("import os, time; print(os.getpid()); time.sleep(600)")
    with log.open("w") as output, supervised(script, directory=tmp_path, environ={}, output=output):
        while not log.read_text().strip():
            time.sleep(0.05)
    assert ended(int(log.read_text()))


PARENT = """
import subprocess, sys
child = "import time; from tasks.supervisor import end_with_parent; end_with_parent(); print('up'); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-u", "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
process.wait()
"""


@pytest.mark.skipif(not LINUX, reason="only Linux tells a process that its parent is gone")
def test_a_process_can_end_with_its_parent() -> None:
    with subprocess.Popen(python(PARENT), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not is_running(child), "the child to end")
