"""Bodies and answers within bounds, as a server hands them over."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from rlhf.serving.bodies import Bounded


async def echo(_scope: Scope, receive: Receive, send: Send) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def reply(parts: list[Message], seconds: float = 30, takes: bool = True) -> list[Message]:
    """What a client gets that sends these parts, and nothing after them; it may take nothing of the answer."""
    got: list[Message] = []

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop(0)

    async def send(message: Message) -> None:
        if not takes:
            await asyncio.Event().wait()
        got.append(message)

    asyncio.run(Bounded(echo, 10, seconds)({"type": "http"}, receive, send))
    return got


def error(got: list[Message]) -> tuple[int, Any]:
    assert (b"connection", b"close") in got[0]["headers"]
    return got[0]["status"], json.loads(got[1]["body"])


def test_a_body_comes_whole_in_whatever_parts() -> None:
    got = reply([part(b"12345"), part(b""), part(b"67890", more=False)])
    assert [got[0]["status"], got[1]["body"]] == [200, b"1234567890"]


def test_a_body_that_is_too_large_is_not_read_to_its_end() -> None:
    parts = [part(b"123456"), part(b"78901"), part(b"unread")]
    assert error(reply(parts)) == (413, {"error": "a body above 10 bytes: send less at once"})
    assert parts == [part(b"unread")]


def test_a_body_that_never_ends_is_given_up() -> None:
    told = {"error": "the body did not come within 0.1 s: send it at once"}
    assert error(reply([part(b"123")], seconds=0.1)) == (408, told)


def test_an_answer_that_nobody_takes_is_given_up() -> None:
    assert reply([part(b"123", more=False)], seconds=0.1, takes=False) == []


def test_who_leaves_is_told_nothing() -> None:
    assert reply([part(b"123"), {"type": "http.disconnect"}]) == []
