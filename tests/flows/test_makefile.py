"""The Makefile: which command a choice gives, and what set-up says and reads."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from rlhf.anchors import CHECKOUT


def make(*arguments: str, directory: Path = CHECKOUT, **environ: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | environ
    return subprocess.run(command, check=False, cwd=directory, env=environment, capture_output=True, text=True)


def last_line(output: str) -> str:
    return " ".join(output.strip().splitlines()[-1].split())


@pytest.mark.parametrize(
    ("arguments", "choices"),
    [
        ([], ""),
        (["scale=smoke", "reward=mixture", "seed=2"], " scale=smoke reward=mixture seed=2"),
        (["critic=separate", "kl=adaptive", "data=gsm8k"], " data=gsm8k critic=separate kl=adaptive"),
        (["overrides=a.b=1 c.d=2"], " a.b=1 c.d=2"),
    ],
)
def test_choices_become_overrides(arguments: list[str], choices: str) -> None:
    # An environment variable that happens to be called as a group is no choice.
    answer = make("--dry-run", "run", *arguments, scale="from the environment")
    assert last_line(answer.stdout) == f".venv/bin/python -m flows.pipeline{choices}"


def test_a_question_reaches_the_policy_as_it_is_written(tmp_path: Path) -> None:
    question = """Tom's 3 "apples" cost $5 each; `how` much?"""
    fake_python = tmp_path / ".venv" / "bin" / "python"
    fake_python.parent.mkdir(parents=True)
    fake_python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake_python.chmod(0o755)
    (tmp_path / "Makefile").write_text((CHECKOUT / "Makefile").read_text())
    (tmp_path / "requirements.lock").touch()
    (tmp_path / ".venv" / ".installed").touch()
    answer = make("ask", f"Q={question}", directory=tmp_path)
    assert answer.stdout.splitlines() == ["-m", "rlhf.ask", "--", question]


def test_gc_leaves_what_a_stage_is_writing(tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "dvc").symlink_to("/bin/true")
    (tmp_path / "Makefile").write_text((CHECKOUT / "Makefile").read_text())
    (tmp_path / "requirements.lock").touch()
    (tmp_path / ".venv" / ".installed").touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    ended = subprocess.Popen(["true"])
    ended.wait()
    places = (tmp_path / ".partial", tmp_path / "models/.partial")  # the second for models on a disk of their own
    for place in places:
        for process, end in ((os.getpid(), "a_1"), (ended.pid, "b_2")):
            (place / f"train_ppo-{process}-{end}" / "models").mkdir(parents=True)
    assert make("gc", directory=tmp_path).returncode == 0
    for place in places:
        assert [path.name for path in place.iterdir()] == [f"train_ppo-{os.getpid()}-a_1"]


def test_without_a_python_that_is_new_enough_set_up_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((CHECKOUT / "Makefile").read_text())
    (tmp_path / "requirements.lock").touch()
    answer = make("setup", "PYTHON=/nowhere/python3", directory=tmp_path)
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[0].startswith("setup: /nowhere/python3 is missing or older than 3.11: ")
    assert not (tmp_path / ".venv").exists()


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
