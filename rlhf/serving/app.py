"""The service's HTTP interface: questions in, answers out, and its health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from rlhf.data.prompts import is_text
from rlhf.serving.batches import Overloaded, Queue
from rlhf.serving.bodies import Bounded
from rlhf.serving.follower import Follower
from rlhf.serving.policies import Failed, Refused

PAGE = Path(__file__).with_name("page.html")
EXAMPLE = '{"questions": ["Tom has 3 apples. Kim gives Tom 4 more. How many apples does Tom have?"]}'
SEND = f"send {EXAMPLE} with Content-Type: application/json"
FAULTS = 3
"""Of a request, so many are told."""
VOTING_TEMPERATURE = 0.7
"""Of several samples, where a request names no temperature."""
BYTES_A_CHARACTER = 12
"""Of JSON, at most: two escapes for a character beyond the basic plane."""


@dataclass(frozen=True)
class Limits:
    """What a request may ask for, and how long it may take."""

    question_characters: int = 2000
    questions: int = 16
    samples: int = 16
    new_tokens: int = 1024
    seconds: float = 60.0


class Asked(BaseModel):
    """A request."""

    model_config = ConfigDict(extra="forbid")

    questions: Annotated[list[str], Field(min_length=1)]
    samples: Annotated[int, Field(ge=1)] = 1
    """Responses a question; the majority of their final numbers decides."""
    max_new_tokens: Annotated[int | None, Field(ge=1)] = None
    """Longest response in tokens; the version's own limit if left out."""
    temperature: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    """0 is greedy; if left out 0 for one sample, 0.7 for several."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The same seed, question and settings give the same answer."""

    def params(self) -> dict[str, Any]:
        """The settings as the policy takes them."""
        temperature = VOTING_TEMPERATURE if self.samples > 1 else 0.0
        settings = {
            "samples": self.samples,
            "max_new_tokens": self.max_new_tokens,
            "temperature": temperature if self.temperature is None else self.temperature,
            "seed": self.seed,
        }
        return {key: value for key, value in settings.items() if value is not None}


class Error(Exception):
    """A request that gets `status` and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(follower: Follower, queue: Queue, limits: Limits) -> FastAPI:
    """The application; while it runs, the alias is followed and the queue is answered."""

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work) for work in (follower.follow(), queue.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await follower.close()

    app = FastAPI(title="gsm8k-rlhf", lifespan=running, docs_url=None, redoc_url=None)
    largest = limits.questions * limits.question_characters * BYTES_A_CHARACTER + 10_000
    app.add_middleware(Bounded, largest=largest, seconds=limits.seconds)
    app.add_exception_handler(Error, _tell)
    app.add_exception_handler(RequestValidationError, _say_what_to_send)
    app.add_exception_handler(HTTPException, _tell_of_http)

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(PAGE)

    @app.post("/answers")
    async def answers(asked: Asked) -> dict[str, Any]:
        """Answers questions; the reply names the version that did."""
        check(asked, limits)
        version, given = await _ask(asked, follower, queue, limits.seconds)
        return {"version": version, "answers": given}

    @app.get("/health/live")
    def live() -> dict[str, bool]:
        """Whether the service runs."""
        return {"live": True}

    @app.get("/health/ready")
    def ready() -> JSONResponse:
        """Whether a version answers, which, for how many seconds, and what keeps the alias's version from it."""
        serving = follower.current
        status = {
            "ready": serving is not None,
            "version": serving.version._asdict() if serving else None,
            "age_seconds": round(time.monotonic() - serving.since, 1) if serving else None,
            "waiting": len(queue),
            "fault": follower.fault,
        }
        return JSONResponse(status, 200 if serving else 503)

    return app


def check(asked: Asked, limits: Limits) -> None:
    """Raises Error for a request beyond the limits."""
    if len(asked.questions) > limits.questions:
        raise Error(413, f"{len(asked.questions)} questions: send at most {limits.questions} at once")
    longest = max(map(len, asked.questions))
    if longest > limits.question_characters:
        raise Error(413, f"a question of {longest} characters: send at most {limits.question_characters}")
    if not all(question.strip() for question in asked.questions):
        raise Error(400, f"a question is empty: {SEND}")
    if not all(map(is_text, asked.questions)):
        raise Error(400, f"a question has half a surrogate pair, which is no text: {SEND}")
    if asked.samples > limits.samples:
        raise Error(400, f"samples: ask for at most {limits.samples}")
    if asked.max_new_tokens and asked.max_new_tokens > limits.new_tokens:
        raise Error(400, f"max_new_tokens: ask for at most {limits.new_tokens}")


async def _ask(
    asked: Asked, follower: Follower, queue: Queue, seconds: float
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The version that answered and its answers; raises Error."""
    if follower.current is None:
        raise Error(503, f"no version is loaded: {follower.fault}")
    try:
        async with asyncio.timeout(seconds):
            version, answers = await queue.submit(asked.questions, asked.params())
    except TimeoutError:
        raise Error(504, f"no answer within {seconds:g} s: ask for less, or try again later") from None
    except Overloaded as error:
        raise Error(503, str(error)) from None
    except Refused as error:
        raise Error(400, str(error)) from None
    except Failed as error:
        raise Error(503, str(error)) from None
    return version._asdict(), answers


async def _tell(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Error)
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return JSONResponse({"error": str(error)}, error.status, headers)


async def _tell_of_http(request: Request, error: Exception) -> JSONResponse:
    """What starlette and FastAPI refuse by themselves: another path or method, a body that cannot be read."""
    assert isinstance(error, HTTPException)
    unreadable = f"the body cannot be read as JSON in UTF-8: {SEND}"
    message = unreadable if error.status_code == 400 else f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse({"error": message}, error.status_code, error.headers)


async def _say_what_to_send(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = "; ".join(_fault(fault["loc"], fault["msg"]) for fault in error.errors()[:FAULTS])
    return JSONResponse({"error": f"{faults}: {SEND}"}, 400)


def _fault(location: Sequence[int | str], message: str) -> str:
    """Where a request is wrong, and how; the first part of a location is always `body`."""
    return f"{'.'.join(map(str, location[1:]))[:100] or 'the body'}: {message}"
