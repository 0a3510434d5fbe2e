"""Threads, determinism, devices, and what progress prints."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
import torch

from rlhf import runtime
from rlhf.config import compose, validate
from rlhf.errors import UsageError
from rlhf.params import Runtime

SETTINGS = validate(compose()).runtime


def settings(**changes: object) -> Runtime:
    return Runtime.model_validate(SETTINGS.model_dump() | changes)


@pytest.fixture
def _torch_as_it_was():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("_torch_as_it_was")
def test_configure_fixes_threads_kernels_and_seed():
    runtime.configure(settings(threads=1, deterministic=True), seed=5)
    first = torch.rand(3)
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()

    runtime.configure(settings(threads=2, deterministic=False), seed=5)
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.rand(3), first)

    runtime.configure(settings(threads=2, deterministic=False), seed=6)
    assert not torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(
    ("name", "gpu", "expected"),
    [
        ("auto", False, "cpu"),
        ("auto", True, "cuda"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_the_device_follows_the_param(monkeypatch, name, gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert runtime.device(settings(device=name)).type == expected


def test_a_missing_gpu_is_a_usage_error_that_names_the_param(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"^runtime\.device=cuda: .*: take runtime\.device=cpu or auto$"):
        runtime.device(settings(device="cuda"))


@pytest.mark.parametrize(("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_precision_follows_the_param(name, dtype):
    assert runtime.matmul_dtype(settings(dtype=name)) == dtype


class Clock:
    """A clock that tests turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(runtime.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_lines_come_every_few_seconds_and_at_the_end(clock, capsys):
    with runtime.progress("train", 8) as bar:
        for _ in range(8):
            clock.now += 2.0
            bar.advance()
            if clock.now < 105.0:
                assert capsys.readouterr().out == ""
    assert lines(capsys) == [
        "train ████████░░░░░░░░░░░░ 3/8 6s",
        "train ███████████████░░░░░ 6/8 12s",
        "train ████████████████████ 8/8 16s",
    ]


def test_the_last_line_is_printed_however_fast_the_work_was(clock, capsys):
    with runtime.progress("score", 3) as bar:
        bar.advance(2)
        bar.advance(1, accuracy=1 / 3, kl=0.0000123456, rows=123456.0)
    assert lines(capsys) == ["score ████████████████████ 3/3 0s accuracy 0.3333 kl 1.235e-05 rows 1.235e+05"]


def test_a_resumed_count_starts_where_it_stopped(clock, capsys):
    with runtime.progress("train", 4) as bar:
        bar.advance(2)
        clock.now += 5.0
        bar.advance(1, loss=2.0)
    assert lines(capsys) == ["train ███████████████░░░░░ 3/4 5s loss 2"]


def test_no_work_is_no_fault(clock, capsys):
    with runtime.progress("train", 0):
        pass
    assert lines(capsys) == []
    with runtime.progress("train", 0) as bar:
        bar.advance(0)
    assert lines(capsys) == ["train ████████████████████ 0/0 0s"]


def test_a_failure_passes_through(clock, capsys):
    def work() -> None:
        with runtime.progress("train", 2) as bar:
            bar.advance()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert lines(capsys) == []


def test_a_terminal_gets_a_live_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with runtime.progress("train", 4) as bar:
        bar.advance(3, loss=0.25)
        bar.advance()
    shown = terminal.getvalue()
    assert "\x1b[" in shown
    for part in ("train", "4/4", "loss 0.25"):
        assert part in shown


def test_the_library_sets_what_torch_reads_when_it_is_loaded():
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "CUBLAS_"))}
    program = "import rlhf, os; print(os.environ['OMP_WAIT_POLICY'], os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["PASSIVE", ":4096:8"]
