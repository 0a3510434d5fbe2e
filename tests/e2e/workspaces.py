"""Copies of this checkout in which the pipeline runs for real, and what such a run leaves on disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 300


def copy_checkout(place: Path) -> Path:
    """Copies what git knows or would add, so that edits count before they are committed; not what a run here left."""
    listing = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard", "--exclude=/dvc.lock"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listing.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    return place


def commit(place: Path) -> None:
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm start"):
        subprocess.run(["git", *command.split()], cwd=place, check=True)


def environment(tracking: Path) -> dict[str, str]:
    """The environment of a user who has activated the virtual environment; tracking and state lie under `tracking`,
    which is made where it is not there."""
    tracking.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tracking / 'mlflow.db'}",
        "RLHF_STATE_DIR": str(tracking / "state"),
        "RLHF_JOURNAL_DIR": str(tracking / "journal"),
    }


def run(command: list[str], place: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, cwd=place, env=environ, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


def succeed(command: list[str], place: Path, environ: dict[str, str]) -> str:
    """Runs the command and returns its standard output; shows all of its output where it fails."""
    done = run(command, place, environ)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below `directory` by its relative path."""
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def locked_outs(place: Path) -> dict[str, dict[str, str]]:
    """What dvc.lock says: stage -> path of an output -> md5."""
    stages = yaml.safe_load((place / "dvc.lock").read_text())["stages"]
    return {name: {out["path"]: out["md5"] for out in block.get("outs", [])} for name, block in stages.items()}
