"""The service with policies that are made up: what moves, what is refused, what is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import httpx
import pytest

from rlhf.errors import UserError
from rlhf.serving import follower as following
from rlhf.serving.app import Limits, create_app
from rlhf.serving.batches import Queue
from rlhf.serving.follower import Follower
from rlhf.serving.policies import Failed, Refused, Version

LIMITS = Limits(question_characters=20, questions=3, samples=4, new_tokens=8, seconds=30)


@dataclass
class FakePolicy:
    """Answers each question with its number, once it may; refuses `bad`, breaks at `broken`, dies at `fatal`."""

    number: str
    may: asyncio.Event
    alive: bool = True
    asked: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)

    async def answer(self, questions: Sequence[str], params: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert self.alive
        self.asked.append((list(questions), dict(params)))
        await self.may.wait()
        if "bad" in questions:
            raise Refused("bad is not answered")
        if "broken" in questions:
            raise Failed("it broke")
        if "fatal" in questions:
            self.alive = False
            raise Failed("its process ended")
        return [{"text": f"{question} by {self.number}"} for question in questions]

    async def close(self) -> None:
        self.alive = False


class FakeSource:
    """A registry with one alias; versions in `broken` do not load."""

    def __init__(self) -> None:
        self.number: str | None = "1"
        self.broken: set[str] = set()
        self.loaded: list[FakePolicy] = []
        self.may = asyncio.Event()
        self.may.set()

    async def wanted(self) -> Version:
        if self.number is None:
            raise UserError("the registry is out of reach")
        return Version("m", self.number, "champion")

    async def load(self, version: Version) -> FakePolicy:
        if version.number in self.broken:
            raise Failed("no weights")
        self.loaded.append(FakePolicy(version.number, self.may))
        return self.loaded[-1]


@dataclass
class Service:
    """A running service: its client, and what stands behind it. `step` looks at the alias once."""

    client: httpx.AsyncClient
    source: FakeSource
    follower: Follower
    queue: Queue
    said: list[str]

    async def ask(self, *questions: str, **settings: Any) -> httpx.Response:
        return await self.client.post("/answers", json={"questions": questions, **settings})

    async def waiting(self, count: int) -> None:
        """Returns once so many requests wait in the queue."""
        while len(self.queue) != count:
            await asyncio.sleep(0)

    async def asked(self, count: int) -> None:
        """Returns once the policy that was loaded last has been asked so often."""
        while len(self.source.loaded[-1].asked) != count:
            await asyncio.sleep(0)


@asynccontextmanager
async def service(
    limits: Limits = LIMITS, longest: int = 2, rows: int = 8, start: bool = True
) -> AsyncIterator[Service]:
    source, said = FakeSource(), list[str]()
    follower = Follower(source, 3600, said.append)
    queue = Queue(lambda: follower.current, rows, longest, limits.seconds)
    app = create_app(follower, queue, limits)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        while start and follower.current is None:
            await asyncio.sleep(0)
        yield Service(client, source, follower, queue, said)


def scenario(test: Callable[..., Any]) -> Callable[..., None]:
    """A test that is a coroutine; fixtures and parameters reach it by name."""

    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


@scenario
async def test_each_answer_names_the_version_that_gave_it_and_a_moved_alias_is_followed() -> None:
    async with service() as s:
        reply = await s.ask("a", "b")
        assert reply.status_code == 200
        assert reply.json() == {
            "version": {"name": "m", "number": "1", "alias": "champion"},
            "answers": [{"text": "a by 1"}, {"text": "b by 1"}],
        }
        s.source.number = "2"
        await s.follower.step()
        reply = await s.ask("a")
        assert (reply.json()["version"]["number"], reply.json()["answers"]) == ("2", [{"text": "a by 2"}])
        assert [policy.alive for policy in s.source.loaded] == [False, True]
        assert s.said == ["m version 1 (champion) serves", "m version 2 (champion) serves in place of version 1"]


@scenario
async def test_what_the_old_version_is_at_is_finished_when_the_alias_moves() -> None:
    async with service() as s:
        s.source.may.clear()
        running = asyncio.create_task(s.ask("a"))
        await s.asked(1)
        s.source.number = "2"
        moving = asyncio.create_task(s.follower.step())
        while len(s.source.loaded) < 2:
            await asyncio.sleep(0)
        after = asyncio.create_task(s.ask("b"))
        s.source.may.set()
        assert (await running).json()["answers"] == [{"text": "a by 1"}]
        assert (await after).json()["answers"] == [{"text": "b by 2"}]
        await moving
        assert not s.source.loaded[0].alive


@scenario
async def test_a_new_version_that_does_not_load_leaves_the_old_one_and_is_told(monkeypatch) -> None:
    async with service() as s:
        s.source.number, s.source.broken = "2", {"2"}
        for _ in range(2):
            await s.follower.step()
        assert (await s.ask("a")).json()["version"]["number"] == "1"
        health = await s.client.get("/health/ready")
        assert (health.status_code, health.json()["ready"], health.json()["version"]["number"]) == (200, True, "1")
        fault = "m version 2 (champion) does not load: no weights"
        assert health.json()["fault"] == fault
        assert s.said[1:] == [f"{fault}; m version 1 (champion) goes on serving"], "told once"
        s.source.broken = set()
        await s.follower.step()
        assert s.follower.current.version.number == "1", "it is left alone for a while"
        monkeypatch.setattr(following, "RETRY_SECONDS", 0)
        s.follower._retry_at = time.monotonic()
        await s.follower.step()
        assert (await s.ask("a")).json()["version"]["number"] == "2"
        assert (await s.client.get("/health/ready")).json()["fault"] is None


@scenario
async def test_a_registry_out_of_reach_changes_nothing_but_the_health() -> None:
    async with service() as s:
        s.source.number = None
        await s.follower.step()
        assert (await s.ask("a")).status_code == 200
        health = (await s.client.get("/health/ready")).json()
        assert (health["ready"], health["fault"]) == (True, "the registry is out of reach")
        s.source.number = "1"
        await s.follower.step()
        assert (await s.client.get("/health/ready")).json()["fault"] is None
        assert len(s.source.loaded) == 1


@scenario
async def test_errors_that_nobody_expected_do_not_end_the_following(monkeypatch) -> None:
    async def full(self: FakeSource, version: Version) -> FakePolicy:
        raise OSError(28, "No space left on device", "/tmp")

    async def broken(self: FakeSource) -> Version:
        raise KeyError("MLFLOW_SOMETHING")

    async with service() as s:
        s.source.number = "2"
        for name, fake, fault in (
            ("load", full, "m version 2 (champion) does not load: OSError: [Errno 28] No space left on device: '/tmp'"),
            ("wanted", broken, "KeyError: 'MLFLOW_SOMETHING'"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(FakeSource, name, fake)
                await s.follower.step()
            assert (await s.client.get("/health/ready")).json()["fault"] == fault
            assert (await s.ask("a")).json()["version"]["number"] == "1"
        s.follower._retry_at = time.monotonic()
        await s.follower.step()
        assert (await s.ask("a")).json()["version"]["number"] == "2"


@scenario
async def test_health_before_and_after_the_first_version(monkeypatch) -> None:
    async def never(self: FakeSource, version: Version) -> FakePolicy:
        raise Failed("not yet")

    monkeypatch.setattr(FakeSource, "load", never)
    async with service(start=False) as s:
        await s.follower.step()
        health = await s.client.get("/health/ready")
        assert (health.status_code, health.json()["ready"], health.json()["version"]) == (503, False, None)
        assert (await s.client.get("/health/live")).json() == {"live": True}
        reply = await s.ask("a")
        assert (reply.status_code, reply.json()) == (
            503,
            {"error": "no version is loaded: m version 1 (champion) does not load: not yet"},
        )
        assert reply.headers["Retry-After"] == "1"
        monkeypatch.undo()
        s.follower._retry_at = time.monotonic()
        await s.follower.step()
        health = await s.client.get("/health/ready")
        assert (health.status_code, health.json()["version"]["number"]) == (200, "1")
        assert health.json()["age_seconds"] >= 0


@scenario
async def test_a_version_that_dies_is_loaded_again() -> None:
    async with service() as s:
        reply = await s.ask("fatal")
        assert (reply.status_code, reply.json()) == (503, {"error": "its process ended"})
        assert (await s.client.get("/health/ready")).status_code == 503
        await s.follower.step()
        assert (await s.ask("a")).json()["answers"] == [{"text": "a by 1"}]
        assert len(s.source.loaded) == 2


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"questions": ["\xff"]}', 400, "the body cannot be read as JSON in UTF-8"),
        (f'{{"questions": ["a"], "seed": {"9" * 5000}}}', 400, "the body cannot be read as JSON in UTF-8"),
        ('{"questions": ["\\ud83d"]}', 400, "a question has half a surrogate pair"),
        ("{", 400, "JSON decode error"),
        ("[]", 400, "the body: "),
        ("{}", 400, "questions: Field required"),
        ('{"questions": []}', 400, "questions: List should have at least 1 item"),
        ('{"questions": "a"}', 400, "questions: Input should be a valid list"),
        ('{"questions": [3]}', 400, "questions.0: Input should be a valid string"),
        ('{"questions": ["a"], "sample": 2}', 400, "sample: Extra inputs are not permitted"),
        ('{"questions": ["a"], "samples": 0}', 400, "samples: Input should be greater than or equal to 1"),
        ('{"questions": ["a"], "samples": 5}', 400, "samples: ask for at most 4"),
        ('{"questions": ["a"], "max_new_tokens": 9}', 400, "max_new_tokens: ask for at most 8"),
        ('{"questions": ["a"], "temperature": -1}', 400, "temperature: Input should be greater than or equal to 0"),
        ('{"questions": ["a", " "]}', 400, "a question is empty"),
        ('{"questions": ["bad"]}', 400, "bad is not answered"),
        ('{"questions": ["broken"]}', 503, "it broke"),
        (f'{{"questions": ["{"a" * 21}"]}}', 413, "a question of 21 characters: send at most 20"),
        ('{"questions": ["a", "b", "c", "d"]}', 413, "4 questions: send at most 3 at once"),
        (f'{{"questions": ["{"a" * 20000}"]}}', 413, "a body above 10720 bytes: send less at once"),
    ],
)
@scenario
async def test_requests_that_are_refused_say_what_to_send(body: str | bytes, status: int, message: str) -> None:
    async with service() as s:
        reply = await s.client.post("/answers", content=body, headers={"Content-Type": "application/json"})
        assert (reply.status_code, message in reply.text) == (status, True), reply.text
        if status == 400 and ("question" in message or "the body" in message):
            assert 'send {"questions": ["Tom' in reply.json()["error"]


@scenario
async def test_a_request_without_its_content_type_is_told_to_name_it() -> None:
    async with service() as s:
        reply = await s.client.post("/answers", content='{"questions": ["a"]}')  # as curl -d without -H
        assert (reply.status_code, reply.json()["error"].endswith("with Content-Type: application/json")) == (400, True)


@scenario
async def test_every_refusal_is_an_error_in_a_few_words() -> None:
    async with service() as s:
        reply = await s.client.get("/answers")
        assert (reply.status_code, reply.json()) == (405, {"error": "GET /answers: Method Not Allowed"})
        assert reply.headers["Allow"] == "POST"
        reply = await s.client.get("/nowhere")
        assert (reply.status_code, reply.json()) == (404, {"error": "GET /nowhere: Not Found"})
        reply = await s.client.post("/answers", json={"questions": list(range(50))})
        assert reply.json()["error"].count("Input should be a valid string") == 3


@scenario
async def test_a_full_queue_is_an_overload_and_empties() -> None:
    async with service(longest=2, rows=1) as s:
        s.source.may.clear()
        first = asyncio.create_task(s.ask("a"))
        await s.asked(1)
        others = [asyncio.create_task(s.ask(name)) for name in "bc"]
        await s.waiting(2)
        reply = await s.ask("d")
        assert (reply.status_code, reply.json()) == (503, {"error": "2 requests wait already: try again later"})
        s.source.may.set()
        assert [(await task).status_code for task in (first, *others)] == [200, 200, 200]


@scenario
async def test_what_waits_with_the_same_settings_goes_in_one_batch() -> None:
    async with service(longest=9, rows=4) as s:
        s.source.may.clear()
        asks = [asyncio.create_task(s.ask("first"))]
        await s.asked(1)
        for count, (questions, settings) in enumerate(
            [
                (["a"], {}),
                (["b"], {"seed": 1}),
                (["c", "d"], {}),
                (["e"], {"samples": 2}),
                (["f", "g"], {}),
                (["h"], {}),
            ],
            start=1,
        ):
            asks.append(asyncio.create_task(s.ask(*questions, **settings)))
            await s.waiting(count)
        s.source.may.set()
        texts = [[answer["text"] for answer in (await ask).json()["answers"]] for ask in asks]
        assert texts == [[f"{name} by 1" for name in names] for names in (["first"], "a", "b", "cd", "e", "fg", "h")]
        assert [questions for questions, _ in s.source.loaded[0].asked] == [
            ["first"],
            ["a", "c", "d", "h"],
            ["b"],
            ["e"],
            ["f", "g"],
        ]
        assert s.source.loaded[0].asked[3][1] == {"samples": 2, "temperature": 0.7, "seed": 0}


@scenario
async def test_in_a_batch_only_who_is_at_fault_is_refused() -> None:
    async with service(longest=9) as s:
        s.source.may.clear()
        asks = [asyncio.create_task(s.ask("first"))]
        await s.asked(1)
        asks += [asyncio.create_task(s.ask(name)) for name in ("a", "bad", "c")]
        await s.waiting(3)
        s.source.may.set()
        assert [(await ask).status_code for ask in asks] == [200, 200, 400, 200]


@scenario
async def test_a_version_that_hangs_is_a_timeout_and_is_loaded_again() -> None:
    async with service(Limits(seconds=0.05)) as s:
        s.source.may.clear()
        reply = await s.ask("a")
        assert (reply.status_code, reply.json()) == (
            504,
            {"error": "no answer within 0.05 s: ask for less, or try again later"},
        )
        while s.source.loaded[0].alive:
            await asyncio.sleep(0.01)
        s.source.may.set()
        await s.follower.step()
        assert (await s.ask("b")).json()["answers"] == [{"text": "b by 1"}]


@scenario
async def test_nothing_is_left_loaded_when_the_service_ends() -> None:
    async with service() as s:
        (policy,) = s.source.loaded
        assert policy.alive
    assert not policy.alive


@scenario
async def test_the_page_needs_nothing_from_elsewhere() -> None:
    async with service() as s:
        page = await s.client.get("/")
        assert page.status_code == 200 and "Ask the policy" in page.text
        assert "http" not in page.text.replace("http-equiv", "")
        assert "/answers" in (await s.client.get("/openapi.json")).json()["paths"]
