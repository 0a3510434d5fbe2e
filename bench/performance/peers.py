"""The peers' environment: bench/peers.lock, installed by hash into an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from rlhf import anchors

LOCK = anchors.CHECKOUT / "bench" / "peers.lock"


def environment(place: Path) -> Path | None:
    """The python of the environment below `place`, made where it is not there yet; None, with one line that says why,
    where it cannot be made."""
    directory = place / f"peers-{sha256(LOCK.read_bytes()).hexdigest()[:12]}"
    python = directory / "bin" / "python"
    if not directory.is_dir():
        print(
            "peers: installing TRL and lm-evaluation-harness; the first time this downloads 3 GB and more", flush=True
        )
        if reason := _make(directory):
            print(f"peers: not installed, their cells stay empty: {reason}", flush=True)
            return None
    return python


def _make(directory: Path) -> str | None:
    """Makes the environment, whole or not at all; returns what went wrong, if anything did."""
    written = directory.with_name(f".{directory.name}.new")
    shutil.rmtree(written, ignore_errors=True)
    uv, python = str(Path(sys.executable).with_name("uv")), str(written / "bin" / "python")
    commands = (
        [uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(written)],
        [uv, "pip", "sync", "--quiet", "--python", python, "--require-hashes", str(LOCK)],
    )
    for command in commands:
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"uv ended with {done.returncode}"]
            return " ".join(line.strip() for line in said[:3])
    written.replace(directory)
    return None
