"""Follows an alias of the registry: the version that holds it serves, and the one before until the new one can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rlhf.errors import UserError, first_line
from rlhf.redaction import redact
from rlhf.serving.policies import Failed, Policy, Version

RETRY_SECONDS = 60.0
"""How long a version that did not load is left alone."""


class Source(Protocol):
    """Where versions come from."""

    async def wanted(self) -> Version:
        """The version that holds the alias; raises UserError where there is none, or no server."""

    async def load(self, version: Version) -> Policy:
        """The version, ready to answer; raises UserError or Failed."""


@dataclass
class Serving:
    """A version that answers, since when (`time.monotonic`), and the lock that each of its answers holds."""

    version: Version
    policy: Policy
    since: float = field(default_factory=time.monotonic)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def retire(self) -> None:
        """Ends the version after the answer that it is at."""
        async with self.busy:
            await self.policy.close()


class Follower:
    """Keeps the version of an alias loaded.

    `fault` says what keeps the alias's version from serving; None where nothing does.
    """

    def __init__(self, source: Source, poll_seconds: float, say: Callable[[str], None] = print) -> None:
        self._source, self._poll, self._say = source, poll_seconds, say
        self._current: Serving | None = None
        self._broken: Version | None = None
        self._retry_at = 0.0
        self.fault: str | None = "the first version is being loaded"

    @property
    def current(self) -> Serving | None:
        """The version that answers now; None where there is none."""
        return self._current if self._current and self._current.policy.alive else None

    async def follow(self) -> None:
        """Follows the alias until it is cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(self._poll)

    async def step(self) -> None:
        """Looks once where the alias points; a version that newly holds it is loaded and takes over."""
        try:
            wanted = await self._source.wanted()
        except Exception as error:  # of any kind: the service outlives whatever a disk, a process or a library has
            self._complain(_in_words(error))
            return
        if self.current and self.current.version == wanted:
            self.fault = None
        elif wanted != self._broken or time.monotonic() >= self._retry_at:
            await self._load(wanted)

    async def _load(self, wanted: Version) -> None:
        try:
            policy = await self._source.load(wanted)
        except Exception as error:  # as above
            self._broken, self._retry_at = wanted, time.monotonic() + RETRY_SECONDS
            self._complain(f"{wanted} does not load: {_in_words(error)}")
            return
        old, self._current = self._current, Serving(wanted, policy)
        self._broken, self.fault = None, None
        self._say(f"{wanted} serves" + (f" in place of version {old.version.number}" if old else ""))
        if old:
            await old.retire()

    def _complain(self, fault: str) -> None:
        """Tells of a fault when it is new."""
        if fault != self.fault:
            self._say(fault + (f"; {self.current.version} goes on serving" if self.current else ""))
        self.fault = fault

    async def close(self) -> None:
        """Ends the version that serves."""
        if self._current:
            await self._current.policy.close()


def _in_words(error: Exception) -> str:
    """One line about an error; that of one which nobody expected says of which kind it is."""
    is_known = isinstance(error, (UserError, Failed))
    return str(error) if is_known else f"{type(error).__name__}: {redact(first_line(error))}"
