"""A version's process, with workers that are small scripts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from rlhf.serving.policies import Failed, Refused, VersionProcess

READY = "import json, sys, time; print(json.dumps({'answers': []}), flush=True); "
ECHO = READY + "[print(json.dumps({'answers': [{'asked': json.loads(line)}]}), flush=True) for line in sys.stdin]"


@asynccontextmanager
async def worker(code: str, seconds: float = 60, left: list[str] | None = None) -> AsyncIterator[VersionProcess]:
    @contextmanager
    def files():
        yield
        if left is not None:
            left.append("files")

    held = files()
    held.__enter__()
    process = await VersionProcess.start([sys.executable, "-c", code], seconds, held)
    try:
        yield process
    finally:
        await process.close()


def test_questions_and_answers_pass_through() -> None:
    left: list[str] = []

    async def ask() -> None:
        async with worker(ECHO, left=left) as process:
            for question in ("Zwei plus zwei?\n", "é", "x" * 200_000):
                (answer,) = await process.answer([question], {"samples": 1})
                assert answer == {"asked": {"questions": [question], "params": {"samples": 1}}}
            assert process.alive and left == []
        assert not process.alive and left == ["files"]

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("after", "error", "message"),
    [
        ("print(json.dumps({'refused': 'too long'}), flush=True); input()", Refused, "too long"),
        ("print(json.dumps({'failed': 'no memory'}), flush=True); input()", Failed, "no memory"),
        ("input(); sys.exit(3)", Failed, "its process ended with exit code 3"),
        ("input(); print('{', end=''); sys.exit(4)", Failed, "its process ended with exit code 4"),
    ],
)
def test_what_a_worker_says_instead_of_an_answer(after: str, error: type[Exception], message: str) -> None:
    async def ask() -> None:
        async with worker(READY + after) as process:
            await process.answer(["a"], {})

    with pytest.raises(error, match=f"^{message}$"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ('print(\'{"failed": "no weights"}\')', 60, "no weights"),
        ("import sys; sys.exit(5)", 60, "its process ended with exit code 5"),
        ("import time; time.sleep(600)", 0.5, "it did not load within 0.5 s"),
    ],
)
def test_a_version_that_does_not_load_leaves_nothing(code: str, seconds: float, message: str) -> None:
    left: list[str] = []

    async def start() -> None:
        async with worker(code, seconds, left):
            pass

    with pytest.raises(Failed, match=f"^{message}$"):
        asyncio.run(start())
    assert left == ["files"]
