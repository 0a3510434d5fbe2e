"""The Makefile: which command a choice gives, and what set-up says and reads."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from flows.pipeline import _overrides
from rlhf.anchors import CHECKOUT


def make(*arguments: str, directory: Path = CHECKOUT, **environ: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | environ
    return subprocess.run(command, check=False, cwd=directory, env=environment, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that is set up, in which python and dvc print what they are called with, and by which process."""
    for program in ("python", "dvc"):
        path = tmp_path / ".venv" / "bin" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\necho $PPID >parent\n')
        path.chmod(0o755)
    (tmp_path / "Makefile").write_text((CHECKOUT / "Makefile").read_text())
    (tmp_path / "requirements.lock").touch()
    (tmp_path / ".venv" / ".installed").touch()
    return tmp_path


def overrides(answer: subprocess.CompletedProcess[str]) -> list[str]:
    """What the pipeline reads from the arguments that make gave it."""
    assert answer.stderr == ""
    module, arguments = answer.stdout.split("\n")[:2], answer.stdout.split("\n", 2)[2].removesuffix("\n").split("\n", 1)
    assert module == ["-m", "flows.pipeline"]
    return _overrides(arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], []),
        (["scale=smoke", "reward=mixture", "seed=2"], ["reward=mixture", "scale=smoke", "seed=2"]),
        (
            ["sclae=smoke", "ppo.kl.coef=0.02", "stage=train_ppo"],
            ["ppo.kl.coef=0.02", "sclae=smoke", "stage=train_ppo"],
        ),
        (["overrides=a.b=1 c.d=2", "kl=fixed"], ["kl=fixed", "a.b=1", "c.d=2"]),
        (["overrides=a='1 2' b=\"'3'\" c=4; touch stray"], ["a=1 2", "b='3'", "c=4;", "touch", "stray"]),
        (
            ["seed=$(shell touch stray); `touch stray` it's $HOME"],
            ["seed=$(shell touch stray); `touch stray` it's $HOME"],
        ),
        (["PYTHON=python3", "Q=2+2?", "upgrade=1", "SYSTEM_PACKAGES=x"], []),
    ],
    ids=str,
)
def test_the_words_on_the_command_line_reach_the_pipeline_as_they_are_written(
    checkout: Path, arguments: list[str], words: list[str]
) -> None:
    # Environment variables that happen to be called so are no choice.
    answer = make("run", *arguments, directory=checkout, scale="from the environment", overrides="seed=1")
    assert overrides(answer) == words
    assert not (checkout / "stray").exists()


def test_the_pipeline_is_makes_own_child(checkout: Path) -> None:
    """So that it ends with it."""
    with subprocess.Popen(["make", "run"], cwd=checkout, stdout=subprocess.DEVNULL) as process:
        pass
    assert (checkout / "parent").read_text() == f"{process.pid}\n"


@pytest.mark.parametrize(("given", "words"), [([], []), (["stage=x; touch stray"], ["x;", "touch", "stray"])], ids=str)
def test_a_stage_reaches_dvc_as_it_is_written(checkout: Path, given: list[str], words: list[str]) -> None:
    answer = make("repro", *given, directory=checkout, stage="from the environment")
    assert answer.stdout.split() == ["repro", *words]
    assert not (checkout / "stray").exists()


def test_a_question_reaches_the_policy_as_it_is_written(checkout: Path) -> None:
    question = """Tom's 3 "apples" cost $5 each; `how` much?"""
    answer = make("ask", f"Q={question}", directory=checkout)
    assert answer.stdout.splitlines() == ["-m", "rlhf.ask", "--", question]


def test_options_reach_the_service_as_they_are_written(checkout: Path) -> None:
    answer = make("serve", "arguments=--port 8080; touch stray", directory=checkout, arguments="--port 1")
    assert answer.stdout.split() == ["-m", "rlhf.serving", "--port", "8080;", "touch", "stray"]
    assert not (checkout / "stray").exists()


def test_a_move_of_the_champion_reaches_the_registry_as_it_is_written(checkout: Path) -> None:
    reason = """Tom's "favourite": `touch stray` $(touch stray)"""
    answer = make("promote", "version=3", f"reason={reason}", directory=checkout, version="4")
    assert answer.stdout.splitlines() == ["-m", "rlhf.registry", "promote", f"--reason={reason}", "--", "3"]
    answer = make("rollback", f"reason={reason}", directory=checkout)
    assert answer.stdout.splitlines() == ["-m", "rlhf.registry", "rollback", f"--reason={reason}"]
    assert not (checkout / "stray").exists()


def test_without_a_python_that_is_new_enough_set_up_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((CHECKOUT / "Makefile").read_text())
    (tmp_path / "requirements.lock").touch()
    answer = make("setup", "PYTHON=/nowhere/python3", directory=tmp_path)
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[0].startswith("setup: /nowhere/python3 is missing or older than 3.11: ")
    assert not (tmp_path / ".venv").exists()


UV = r"""#!/bin/sh
printf 'Resolved 3 packages\nDownloading torch (514.2MiB)\nDownloading ruff (10.2MiB)\n Downloaded ruff\n' >&2
printf '   Building antlr4\n      Built antlr4\nInstalled 3 packages\n + torch==2\n - ruff==1\n ~ dvc==3\n' >&2
printf 'error: Hash mismatch for `x`\n\nExpected:\n  sha256:1\n\nComputed:\n  sha256:2\n' >&2
exit 2
"""


def test_set_up_shows_progress_and_failures_but_no_line_a_package(checkout: Path) -> None:
    (checkout / ".venv/.installed").unlink()
    uv = checkout / ".venv/bin/uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    answer = make("setup", directory=checkout)
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[:-1] == [
        *("Resolved 3 packages", "Downloading torch (514.2MiB)", "Installed 3 packages"),
        *("error: Hash mismatch for `x`", "", "Expected:", "  sha256:1", "", "Computed:", "  sha256:2"),
    ]
    assert not (checkout / ".venv/.installed").exists()


def test_the_lock_holds_names_versions_and_hashes_only() -> None:
    lines = (CHECKOUT / "requirements.lock").read_text().splitlines()
    content = [line for line in lines if not line.startswith("#")]
    requirement = re.compile(r"[a-z0-9][a-z0-9._-]*==\S+( ; .+)? \\")
    hashed = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
    assert [line for line in content if not requirement.fullmatch(line) and not hashed.fullmatch(line)] == []
    assert any(line.startswith("uv==") for line in content)
    assert any(line.startswith("pip==") for line in content)


def test_set_up_takes_uv_out_of_the_lock_with_its_hashes() -> None:
    (expression,) = re.findall(r"sed -n '(/\^uv==/.*?p)'", (CHECKOUT / "Makefile").read_text())
    command = ["sed", "-n", expression.replace("$$", "$"), str(CHECKOUT / "requirements.lock")]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[0].startswith("uv==")
    assert len(lines) > 2
    assert all("--hash=sha256:" in line for line in lines[1:])
    assert not lines[-1].endswith("\\")
