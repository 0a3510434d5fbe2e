"""A workspace that locks other packages: uv makes its environment from a wheel of our own, and a stage runs in it."""

from __future__ import annotations

import os
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from flows.pipeline_flow import _make_environment
from rlhf import config, tracking
from rlhf.anchors import CHECKOUT
from rlhf.config import compose
from rlhf.environments import interpreter
from rlhf.errors import UserError
from tasks.dvc_stages import run_stage
from tasks.workspaces import Workspace

# Stands for DVC, and runs the stage's command as that would: with the `python` that it finds.
PROGRAM = """
import subprocess, sys
print(f"Running stage '{sys.argv[-1]}':", flush=True)
sys.exit(subprocess.run(["python", "-c", "import sys; print(sys.prefix)"]).returncode)
"""
STAGE = """
stages:
  good:
    cmd: python -c "..."
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel, the only one that uv may find."""
    path = tmp_path / "wheels" / "dvc-99.0-py3-none-any.whl"
    path.parent.mkdir()
    about = "dvc-99.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("dvc/__init__.py", "")
        archive.writestr("dvc/__main__.py", PROGRAM)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: dvc\nVersion: 99.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "dvc/__init__.py,,\ndvc/__main__.py,,\n")
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(path.parent))
    return path


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    place = tmp_path / "workspace"
    place.mkdir()
    (place / "dvc.yaml").write_text(STAGE)
    config.write(compose(["scale=smoke"]), place / "params.yaml")
    return Workspace(place, "commit")


def lock(workspace: Workspace, digest: str) -> None:
    (workspace.path / "requirements.lock").write_text(f"dvc==99.0 \\\n    --hash=sha256:{digest}\n")


def test_a_stage_runs_with_the_packages_of_its_own_lock(
    wheel: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_run_by_outs", lambda *_: None)
    lock(workspace, sha256(wheel.read_bytes()).hexdigest())
    with disable_run_logger():
        _make_environment(workspace)
        done = run_stage.fn("good", "parent", workspace.path)
    assert done.ran
    assert Path(done.last_line) == workspace.path / ".venv"
    assert interpreter(workspace.path) == workspace.path / ".venv/bin/python"
    installed = {path.name for path in workspace.path.glob(".venv/lib/*/site-packages/*.dist-info")}
    assert installed == {"dvc-99.0.dist-info"}


def test_a_package_that_is_not_the_locks_is_refused_and_tried_again(wheel: Path, workspace: Workspace) -> None:
    lock(workspace, "0" * 64)
    with disable_run_logger(), pytest.raises(UserError, match=r"the environment of .*: uv pip sync ended with [12]$"):
        _make_environment(workspace)
    lock(workspace, sha256(wheel.read_bytes()).hexdigest())
    with disable_run_logger():
        _make_environment(workspace)
    assert list(workspace.path.glob(".venv/lib/*/site-packages/dvc/__main__.py"))


def test_the_same_lock_needs_no_environment(workspace: Workspace) -> None:
    with disable_run_logger():
        _make_environment(workspace)  # none at all
        (workspace.path / "requirements.lock").write_bytes((CHECKOUT / "requirements.lock").read_bytes())
        _make_environment(workspace)
    assert interpreter(workspace.path) == Path(sys.executable)
    assert not (workspace.path / ".venv").exists()
