"""`python -m rlhf.serving` on loopback, for tests."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from rlhf import anchors

SECONDS = 180


@contextmanager
def serving(name: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The service of the model `name` in a process of its own, and a client; ended by its id whatever happens."""
    command = [sys.executable, "-m", "rlhf.serving", "--name", name, "--port", "0", "--poll", "1", *arguments]
    process = subprocess.Popen(command, cwd=anchors.CHECKOUT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        with httpx.Client(base_url=address, timeout=SECONDS) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()


def wait_for(client: httpx.Client, **wanted: Any) -> dict[str, Any]:
    """The health, as soon as it says what is `wanted`."""
    deadline = time.monotonic() + SECONDS
    while True:
        health: dict[str, Any] = client.get("/health/ready").json()
        found = health | {"number": health["version"] and health["version"]["number"]}
        if wanted.items() <= found.items():
            return health
        assert time.monotonic() < deadline, health
        time.sleep(0.1)
