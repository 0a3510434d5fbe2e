"""The supervisor with real processes. Each process writes its id to a file, so that a test knows what may be left."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks import supervisor

SUPERVISOR = [sys.executable, supervisor.__file__]
PATIENCE_SECONDS = 60.0

# Notes its id, tells on TERM that it was asked, and sleeps; with "stubborn" it ignores TERM.
SLEEPER = """
import os, pathlib, signal, sys, time
place, manner = pathlib.Path(sys.argv[1]), sys.argv[2]
def on_term(*_):
    (place / f"asked.{os.getpid()}").touch()
    if manner != "stubborn":
        sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
(place / f"ready.{os.getpid()}").touch()
while True:
    time.sleep(0.1)
"""

# As dvc does, starts a process below itself; "session" puts that one into a session of its own, as torchrun may.
PARENT = """
import subprocess, sys
sleeper, place, manner, kind = sys.argv[1:]
subprocess.Popen([sys.executable, sleeper, place, manner], start_new_session=kind == "session")
sys.argv = [sleeper, place, "polite"]
exec(open(sleeper).read())
"""

# Starts a process in a session of its own, waits until it is up, and exits.
LEAVER = """
import pathlib, subprocess, sys, time
subprocess.Popen(sys.argv[1:], start_new_session=True)
while not list(pathlib.Path(sys.argv[3]).glob("ready.*")):
    time.sleep(0.05)
"""

# A flow that holds the lifeline and does nothing else.
FLOW = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
process.wait()
"""


@pytest.fixture
def scripts(tmp_path: Path) -> dict[str, str]:
    texts = {"sleeper": SLEEPER, "parent": PARENT, "leaver": LEAVER, "flow": FLOW}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return {name: str(tmp_path / f"{name}.py") for name in texts}


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"still waiting: {what}"
        time.sleep(0.05)


def noted(place: Path, what: str) -> set[int]:
    return {int(path.suffix[1:]) for path in place.glob(f"{what}.*") if path.suffix != ".py"}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def start(arguments: list[str], **pipes: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*SUPERVISOR, *arguments], stdin=subprocess.PIPE, start_new_session=True, **pipes)


def is_held(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def deputy_of(process: subprocess.Popen[bytes]) -> int:
    return supervisor.descendants(process.pid)[0]


@pytest.mark.parametrize(("command", "code"), [("pass", 0), ("raise SystemExit(7)", 7)])
def test_passes_the_exit_code_on(command: str, code: int) -> None:
    process = start(["--", sys.executable, "-c", command])
    assert process.wait(PATIENCE_SECONDS) == code


def test_a_command_that_a_signal_ended_gives_128_and_the_signal() -> None:
    process = start(["--", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGKILL


def test_a_missing_command_is_one_line(tmp_path: Path) -> None:
    process = start(["--", str(tmp_path / "nowhere")], stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.read().decode() == f"supervisor: {tmp_path / 'nowhere'}: No such file or directory\n"
    assert process.wait(PATIENCE_SECONDS) == supervisor.NOT_FOUND


def test_the_command_reads_no_lifeline_and_writes_through() -> None:
    script = "import sys; print(repr(sys.stdin.read()))"
    process = subprocess.Popen(
        [*SUPERVISOR, "--", sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.read() == "''\n"
    process.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("kind", ["group", "session"])
def test_a_killed_flow_leaves_nothing(tmp_path: Path, scripts: dict[str, str], kind: str) -> None:
    if kind == "session" and not supervisor.LINUX:
        pytest.skip("only Linux lets a process adopt orphans")
    tree = [sys.executable, scripts["parent"], scripts["sleeper"], str(tmp_path), "polite", kind]
    flow = subprocess.Popen([sys.executable, scripts["flow"], *SUPERVISOR, "--grace", "30", "--", *tree])
    wait_until(lambda: len(noted(tmp_path, "ready")) == 2, "both processes to start")
    flow.kill()
    flow.wait()
    ready = noted(tmp_path, "ready")
    wait_until(lambda: not any(map(is_running, ready)), "the processes to end")
    assert noted(tmp_path, "asked") == ready  # they ended on TERM, long before the grace time was over


def test_what_ignores_term_is_killed_after_the_grace_time(tmp_path: Path, scripts: dict[str, str]) -> None:
    process = start(["--grace", "0.3", "--", sys.executable, scripts["sleeper"], str(tmp_path), "stubborn"])
    wait_until(lambda: noted(tmp_path, "ready"), "the process to start")
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
    assert noted(tmp_path, "asked") == noted(tmp_path, "ready")
    assert not any(map(is_running, noted(tmp_path, "ready")))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_ends_the_command(tmp_path: Path, scripts: dict[str, str], number: int) -> None:
    process = start(["--grace", "30", "--", sys.executable, scripts["sleeper"], str(tmp_path), "polite"])
    wait_until(lambda: noted(tmp_path, "ready"), "the process to start")
    os.kill(process.pid, number)
    assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM  # though the sleeper exits with 0
    assert noted(tmp_path, "asked") == noted(tmp_path, "ready")


@pytest.mark.skipif(not supervisor.LINUX, reason="only Linux lets a process adopt orphans")
def test_what_the_command_leaves_behind_is_ended_too(tmp_path: Path, scripts: dict[str, str]) -> None:
    sleeper = [sys.executable, scripts["sleeper"], str(tmp_path), "polite"]
    process = start(["--grace", "30", "--", sys.executable, scripts["leaver"], *sleeper])
    assert process.wait(PATIENCE_SECONDS) == 0
    assert len(noted(tmp_path, "ready")) == 1
    assert noted(tmp_path, "asked") == noted(tmp_path, "ready")
    assert not any(map(is_running, noted(tmp_path, "ready")))


def test_descendants_are_found_below_a_process(tmp_path: Path, scripts: dict[str, str]) -> None:
    tree = [sys.executable, scripts["parent"], scripts["sleeper"], str(tmp_path), "polite", "group"]
    process = subprocess.Popen(tree)
    try:
        wait_until(lambda: len(noted(tmp_path, "ready")) == 2, "both processes to start")
        below = noted(tmp_path, "ready") - {process.pid}
        assert set(supervisor.descendants(process.pid)) == below
        assert set(supervisor.descendants(os.getpid())) >= {process.pid} | below
    finally:
        for pid in noted(tmp_path, "ready"):
            os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(not supervisor.LINUX, reason="only Linux lets a process adopt orphans")
@pytest.mark.parametrize("killed", ["supervisor", "deputy"])
def test_a_killed_supervisor_leaves_nothing_and_the_lock_until_then(
    tmp_path: Path, scripts: dict[str, str], killed: str
) -> None:
    """The tree ignores TERM, so that there is time to see it go on without the supervisor."""
    lock, tree = tmp_path / "cpu.lock", [sys.executable, scripts["parent"], scripts["sleeper"], str(tmp_path)]
    process = start(["--grace", "3", "--lock", str(lock), "--", *tree, "stubborn", "session"])
    wait_until(lambda: len(noted(tmp_path, "ready")) == 2, "both processes to start")
    ready = noted(tmp_path, "ready")
    os.kill(process.pid if killed == "supervisor" else deputy_of(process), signal.SIGKILL)
    wait_until(lambda: noted(tmp_path, "asked") == ready, "both to be asked to end")
    stubborn = [pid for pid in ready if is_running(pid)]
    held = is_held(lock)
    assert held or not any(map(is_running, stubborn))
    wait_until(lambda: not is_held(lock), "the lock")
    assert not any(map(is_running, ready))
    assert process.wait(PATIENCE_SECONDS) == (-signal.SIGKILL if killed == "supervisor" else 128 + signal.SIGKILL)


def test_a_lock_is_waited_for_and_the_holder_is_named(tmp_path: Path, scripts: dict[str, str]) -> None:
    lock = tmp_path / "cpu.lock"
    sleeper = [sys.executable, scripts["sleeper"], str(tmp_path), "polite"]
    first = start(["--lock", str(lock), "--holder", "train_ppo of red-fox", "--", *sleeper])
    wait_until(lambda: noted(tmp_path, "ready"), "the first to start")
    second = start(["--lock", str(lock), "--", sys.executable, "-c", "print('my turn')"], stdout=subprocess.PIPE)
    assert second.stdout is not None and first.stdin is not None
    waiting = f"supervisor: waiting for device cpu, which process {first.pid} (train_ppo of red-fox) holds\n"
    assert second.stdout.readline().decode() == waiting
    first.stdin.close()
    assert second.stdout.readline().decode().startswith("supervisor: device cpu is free after ")
    assert second.stdout.readline().decode() == "my turn\n"
    assert second.wait(PATIENCE_SECONDS) == 0
    assert first.wait(PATIENCE_SECONDS) == supervisor.STOPPED
    assert lock.read_text() == f"process {second.pid}"


@pytest.mark.parametrize("how", ["lifeline", "signal"])
def test_who_waits_for_a_lock_can_be_stopped_and_starts_nothing(tmp_path: Path, how: str) -> None:
    lock = tmp_path / "cpu.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = start(["--lock", str(lock), "--", "touch", str(tmp_path / "started")], stdout=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None
        assert b"waiting for device cpu" in process.stdout.readline()
        process.stdin.close() if how == "lifeline" else process.terminate()
        assert process.wait(PATIENCE_SECONDS) == supervisor.STOPPED
    assert not (tmp_path / "started").exists()
    assert not is_held(lock)


def test_locks_given_in_any_order_never_block_each_other(tmp_path: Path) -> None:
    locks = [str(tmp_path / "cuda-0.lock"), str(tmp_path / "cuda-1.lock")]
    orders = [["--lock", one, "--lock", other] for one, other in (locks, locks[::-1])]
    processes = [start([*order, "--", "sleep", "0.2"]) for order in orders * 3]
    assert [process.wait(PATIENCE_SECONDS) for process in processes] == [0] * 6


def test_a_command_over_its_limit_is_ended(tmp_path: Path, scripts: dict[str, str]) -> None:
    lock, sleeper = tmp_path / "cpu.lock", [sys.executable, scripts["sleeper"], str(tmp_path), "polite"]
    process = start(["--limit", "2", "--lock", str(lock), "--", *sleeper])
    assert process.wait(PATIENCE_SECONDS) == supervisor.TIMED_OUT
    assert len(noted(tmp_path, "ready")) == 1
    assert noted(tmp_path, "asked") == noted(tmp_path, "ready")
    assert not any(map(is_running, noted(tmp_path, "ready")))
    assert not is_held(lock)


def test_waiting_for_a_lock_takes_nothing_from_the_limit(tmp_path: Path) -> None:
    lock = tmp_path / "cpu.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = start(["--limit", "3", "--lock", str(lock), "--", "true"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(3.1)
    assert process.wait(PATIENCE_SECONDS) == 0
