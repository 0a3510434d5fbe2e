"""How a command ends: its exit code, and one line for whatever it raised."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rlhf.errors import Problems, UsageError, UserError, first_line, run_command


@pytest.fixture(autouse=True)
def _in_a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def raising(error: BaseException):
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (3, 3)])
def test_a_command_that_raises_nothing_says_nothing(returned, code, capsys):
    assert run_command("x", lambda: returned) == code
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("models/sft is missing: run dvc repro\nfinetune_sft"), 1, "models/sft is missing: run dvc repro fi"),
        (UsageError("seed: wrong"), 2, "seed: wrong"),
        (KeyboardInterrupt(), 1, "interrupted: stays done"),
        (OSError(errno.EROFS, "Read-only file system", "params.yaml"), 1, "params.yaml: Read-only file system: make "),
    ],
    ids=str,
)
def test_an_error_is_one_line_and_an_exit_code(error, code, line, capsys):
    assert run_command("x", raising(error), "interrupted: stays done") == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"x: {line}")
    assert not Path("runs").exists()


def test_several_problems_are_a_line_each_and_a_count(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hidden-token")
    assert run_command("x", raising(Problems(["a is\nwrong", "b has hidden-token"], "key: "))) == 1
    assert (
        capsys.readouterr().err == "x: key: a is wrong\nx: key: b has ***\nx: key: 2 problems, each on a line above\n"
    )
    assert str(Problems(["a is wrong"])) == "a is wrong"


def test_an_unexpected_error_leaves_its_traceback_in_a_file(capsys):
    assert run_command("x", raising(ZeroDivisionError("division by zero\nand more"))) == 1
    assert capsys.readouterr().err == (
        "x: ZeroDivisionError: division by zero: not expected, please report it with runs/x-error.log\n"
    )
    assert "in command" in Path("runs/x-error.log").read_text()


def test_an_unexpected_error_is_one_line_where_nothing_can_be_written(capsys, monkeypatch):
    def read_only(_path: Path, *_arguments: object, **_options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    assert run_command("x", raising(ZeroDivisionError("division by zero"))) == 1
    assert capsys.readouterr().err.endswith("please report it with no log (Read-only file system)\n")


@pytest.mark.parametrize(("text", "line"), [("one.\ntwo", "one"), ("\n  two ", "two"), ("", "ValueError")])
def test_first_line(text, line):
    assert first_line(ValueError(text)) == line
