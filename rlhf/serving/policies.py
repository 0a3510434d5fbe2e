"""A version of the policy as the service sees it, and the process that it answers in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

LONGEST_LINE = 2**26
"""Bytes of the longest reply that is read from a process."""

Answer = dict[str, Any]
"""See `ServedPolicy.predict`."""


class Refused(Exception):
    """The request is at fault; the message says what to change."""


class Failed(Exception):
    """The version is at fault, or there is none."""


class Version(NamedTuple):
    """A version of a registered model, and the alias by which it was found."""

    name: str
    number: str
    alias: str

    def __str__(self) -> str:
        return f"{self.name} version {self.number} ({self.alias})"


class Policy(Protocol):
    """A loaded version; it answers one call at a time."""

    @property
    def alive(self) -> bool:
        """Whether it can answer at all."""

    async def answer(self, questions: Sequence[str], params: Mapping[str, Any]) -> list[Answer]:
        """One answer a question; raises Refused or Failed. After a cancelled call only `close` may follow."""

    async def close(self) -> None:
        """Ends it at once."""


class VersionProcess:
    """A version in a process of its own, with the library that was registered with it: see rlhf/registry/worker.py."""

    def __init__(self, process: asyncio.subprocess.Process, files: AbstractContextManager[Any]) -> None:
        self._process, self._files = process, files

    @classmethod
    async def start(cls, command: Sequence[str], seconds: float, files: AbstractContextManager[Any]) -> VersionProcess:
        """Starts a worker and waits until it is loaded; `files` are left when it is closed.

        Raises Failed where it does not load within `seconds`.
        """
        pipe = asyncio.subprocess.PIPE
        # In a session of its own, so that Ctrl-C in a terminal lets it finish its answer.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, start_new_session=True, limit=LONGEST_LINE
        )
        started = cls(process, files)
        try:
            async with asyncio.timeout(seconds):
                await started._reply()
        except BaseException as error:
            await started.close()
            if isinstance(error, TimeoutError):
                raise Failed(f"it did not load within {seconds:g} s") from None
            raise
        return started

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.returncode is None

    async def answer(self, questions: Sequence[str], params: Mapping[str, Any]) -> list[Answer]:
        """One answer a question; raises Refused or Failed."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"questions": questions, "params": params}).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            raise Failed(await self._ended()) from None
        return await self._reply()

    async def close(self) -> None:
        """Kills the process and removes its files."""
        if self.alive:
            self._process.kill()
        await self._process.wait()
        self._files.__exit__(None, None, None)

    async def _reply(self) -> list[Answer]:
        assert self._process.stdout
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise Failed(await self._ended())
        reply = json.loads(line)
        if "refused" in reply:
            raise Refused(reply["refused"])
        if "failed" in reply:
            raise Failed(reply["failed"])
        answers: list[Answer] = reply["answers"]
        return answers

    async def _ended(self) -> str:
        return f"its process ended with exit code {await self._process.wait()}"
