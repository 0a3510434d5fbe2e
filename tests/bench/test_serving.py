"""What the load measurement makes of its seconds, by hand."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from bench.serving import CLIENTS, MODES, PAGE, Load, markdown, one_round, summary
from bench.workspaces import with_marked


def test_a_summary_by_hand() -> None:
    rounds = [(2.0, [0.1, 0.2]), (1.0, [0.3, 0.4]), (4.0, [0.5])]  # 1, 2 and 0.25 answers a second
    assert summary(8, "in batches", rounds) == Load(8, "in batches", 1.0, 0.3, 0.48)


def test_the_table_has_a_row_for_each_number_of_clients() -> None:
    loads = [Load(n, mode, n * (2.0 if mode == "in batches" else 1.0), 0.5, 1.25) for n in CLIENTS for mode in MODES]
    head, rule, first, *others = markdown(loads).splitlines()
    assert head.count("|") == rule.count("|") == first.count("|") == 9
    assert first == "| 1 | 2.0 | 0.50 s | 1.25 s | 1.0 | 0.50 s | 1.25 s | 2.0 |"
    assert len(others) == len(CLIENTS) - 1
    assert markdown(loads) in with_marked(PAGE.read_text(), "serving", markdown(loads))


def test_clients_share_the_questions_and_each_waits_for_its_answer() -> None:
    asked, at_once, most = list[bytes](), 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        asked.append(request.content)
        return httpx.Response(503 if b"broken" in request.content else 200)

    async def run(questions: list[str]) -> tuple[float, list[float]]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await one_round(client, "http://t", questions, 3)

    _, took = asyncio.run(run([str(number) for number in range(7)]))
    assert (len(took), len(set(asked)), most) == (7, 7, 3)
    with pytest.raises(httpx.HTTPStatusError):
        asyncio.run(run(["broken"]))
