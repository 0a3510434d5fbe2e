"""The queue in front of the policy: whatever waits with the same settings is answered in one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.serving.follower import Serving
from rlhf.serving.policies import Answer, Failed, Refused, Version


class Overloaded(Exception):
    """The queue is full."""


@dataclass(frozen=True, eq=False)
class Job:
    """A request that waits: its questions, its settings, and where its answers go."""

    questions: Sequence[str]
    params: Mapping[str, Any]
    done: asyncio.Future[tuple[Version, list[Answer]]]

    @property
    def rows(self) -> int:
        """How many responses it takes."""
        return len(self.questions) * int(self.params.get("samples", 1))


class Queue:
    """Requests in the order in which they came, answered in batches by whatever version serves then.

    Args:
        current: the version that serves now.
        rows: responses sampled at once; a larger request goes alone, and with 1 each does.
        longest: requests that may wait.
        seconds: how long a batch may take; a version that takes longer is ended, for it may hang.
    """

    def __init__(self, current: Callable[[], Serving | None], rows: int, longest: int, seconds: float) -> None:
        self._current, self._rows, self._longest, self._seconds = current, rows, longest, seconds
        self._jobs: deque[Job] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(
        self, questions: Sequence[str], params: Mapping[str, Any]
    ) -> asyncio.Future[tuple[Version, list[Answer]]]:
        """The version that answers and its answers, in time; cancel it to leave the queue. Raises Overloaded."""
        if len(self._jobs) >= self._longest:
            raise Overloaded(f"{len(self._jobs)} requests wait already: try again later")
        job = Job(questions, params, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._arrived.set()
        return job.done

    async def run(self) -> None:
        """Answers until it is cancelled."""
        while True:
            await self._arrived.wait()
            if batch := self._take():
                await self._answer(batch)
            else:
                self._arrived.clear()

    def _take(self) -> list[Job]:
        """The first job and the later ones that can go with it; they leave the queue."""
        waiting = [job for job in self._jobs if not job.done.done()]
        batch, rows = waiting[:1], sum(job.rows for job in waiting[:1])
        for job in waiting[1:]:
            if job.params == batch[0].params and rows + job.rows <= self._rows:
                batch.append(job)
                rows += job.rows
        self._jobs = deque(job for job in waiting if job not in batch)
        return batch

    async def _answer(self, batch: Sequence[Job]) -> None:
        """Answers a batch; raises nothing, for each job is told of its own error."""
        serving = self._current()
        try:
            if serving is None:
                raise Failed("no version is loaded")
            async with serving.busy:
                answers = await self._ask(serving, batch)
        except Refused as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:  # one of them is at fault
                for job in batch:
                    await self._answer([job])
        except Exception as error:
            _fail(batch, error if isinstance(error, Failed) else Failed(f"{type(error).__name__}: {error}"))
        else:
            rest = iter(answers)
            for job in batch:
                own = [next(rest) for _ in job.questions]
                if not job.done.done():
                    job.done.set_result((serving.version, own))

    async def _ask(self, serving: Serving, batch: Sequence[Job]) -> list[Answer]:
        questions = [question for job in batch for question in job.questions]
        try:
            async with asyncio.timeout(self._seconds):
                return await serving.policy.answer(questions, batch[0].params)
        except TimeoutError:
            await serving.policy.close()
            raise Failed(f"{serving.version} took longer than {self._seconds:g} s: it is loaded again") from None


def _fail(batch: Sequence[Job], error: Exception) -> None:
    for job in batch:
        if not job.done.done():
            job.done.set_exception(error)
