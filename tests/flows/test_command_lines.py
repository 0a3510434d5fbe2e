"""Every command says in its own words what it makes of options and words that it does not have."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlhf.anchors import CHECKOUT


def run(command: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", *command.split()]
    return subprocess.run(arguments, cwd=CHECKOUT, capture_output=True, text=True, check=False)


NO_OPTION = "--dry-run: no such option: write key=value, as limits.disk_gb=20 (--help alone says more)"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("flows.gc --dry-run", f"gc: {NO_OPTION}"),
        ("flows.pipeline --dry-run", f"pipeline: {NO_OPTION}"),
        ("stages.evaluate --dry-run", f"evaluate: {NO_OPTION}"),
        ("rlhf.config compose --dry-run", f"config: {NO_OPTION}"),
        ("rlhf.config", "config: no command is given: write compose, check or help (python -m rlhf.config --help)"),
        ("rlhf.config frob", "config: frob: no command: write compose, check or help (python -m rlhf.config --help)"),
    ],
)
def test_what_is_no_option_is_refused_in_one_line(command: str, line: str) -> None:
    done = run(command)
    assert (done.returncode, done.stderr, done.stdout) == (2, f"{line}\n", "")


@pytest.mark.parametrize("command", ["flows.ui", "flows.serve", "flows.health", "rlhf.tracking"])
def test_what_is_no_word_is_refused_before_anything_starts(command: str) -> None:
    done = run(f"{command} frob --x=y")
    assert (done.returncode, done.stdout) == (2, "")
    assert "frob" in done.stderr.splitlines()[-1]


HELPED = [
    *("flows.gc", "flows.pipeline", "flows.ui", "flows.health", "rlhf.config", "rlhf.tracking", "rlhf.ppo.replay"),
    *("stages.evaluate", "rlhf.registry", "tasks.backup"),
]


@pytest.mark.parametrize("command", HELPED)
def test_help_is_no_error(command: str) -> None:
    done = run(f"{command} --help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
