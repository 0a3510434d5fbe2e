"""Requests that come, and answers that go, within bounds: whoever is slow, or sends too much, keeps nobody waiting."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class NotTakenError(Exception):
    """The client does not take its answer."""


class Bounded:
    """An application whose requests are read whole first: `largest` bytes at most, within `seconds`.

    Each part of an answer has to be taken within `seconds` as well; else the connection is closed.
    """

    def __init__(self, app: ASGIApp, largest: int, seconds: float) -> None:
        self._app, self._largest, self._seconds = app, largest, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, a body that is out of bounds with 413 or 408 and one line of JSON."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._seconds):
                    await send(message)
            except TimeoutError:
                raise NotTakenError from None

        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive)
        except TimeoutError:
            await _refuse(send_in_time, 408, f"the body did not come within {self._seconds:g} s: send it at once")
            return
        if body is None:
            return  # the client has left
        if len(body) > self._largest:
            await _refuse(send_in_time, 413, f"a body above {self._largest} bytes: send less at once")
            return
        rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return rest.pop() if rest else await receive()

        with suppress(NotTakenError):  # the server closes the connection, for the answer is not whole
            await self._app(scope, replay, send_in_time)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, cut off once it is too large; None where the client has left."""
        body = b""
        while len(body) <= self._largest:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return body


async def _refuse(send: Send, status: int, message: str) -> None:
    """Answers, and has the connection closed: the rest of the body is not read."""
    content = json.dumps({"error": message}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close"}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})
