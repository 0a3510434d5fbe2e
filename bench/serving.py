"""Measures the service under load: answers in batches beside one at a time, with 1, 8 and 32 clients.

    python -m bench.serving [--policy models/policy] [--rounds 3]

Two services of the same registered version run side by side, one of them with --batch 1. Each client asks one question
after the other, greedily; rounds take turns between the two, so that whatever else the machine does slows both. Writes
bench/results/serving.csv and the table in docs/serving.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx

from bench.workspaces import RESULTS, with_marked, write_csv, write_text
from rlhf import anchors
from rlhf.data.word_problems import generate
from rlhf.errors import UserError, run_command
from tasks.processes import supervised

CLIENTS = (1, 8, 32)
QUESTIONS = 32
MODES = {"in batches": "64", "one at a time": "1"}
"""Mode -> the service's --batch."""
NAME, NEW_TOKENS = "measured", 128
SECONDS = 600

TABLE = RESULTS / "serving.csv"
PAGE = anchors.CHECKOUT / "docs" / "serving.md"


class Load(NamedTuple):
    """What one mode did with so many clients: answers a second, and seconds an answer took."""

    clients: int
    mode: str
    per_second: float
    p50: float
    p95: float


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.serving", description="Measure the service under load.")
    parser.add_argument("--policy", type=Path, default=Path("models/policy"), help="checkpoint to serve (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each mode and number of clients (%(default)s)")
    given = parser.parse_args(arguments)
    return run_command("bench.serving", lambda: measure(given.policy, given.rounds))


def measure(policy: Path, rounds: int) -> None:
    """Registers the policy in a registry for the moment, serves it in both modes, and writes what was measured."""
    with TemporaryDirectory() as place, ExitStack() as stack:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{place}/mlflow.db"
        register(policy)
        addresses = {
            mode: stack.enter_context(service(Path(place, f"{batch}.log"), batch)) for mode, batch in MODES.items()
        }
        loads = asyncio.run(compare(addresses, rounds))
    write_csv(TABLE, [Load._fields, *loads])
    write_text(PAGE, with_marked(PAGE.read_text(), "serving", markdown(loads)))


def register(policy: Path) -> None:
    """Makes the checkpoint a candidate of the registry that MLFLOW_TRACKING_URI names."""
    from rlhf import tracking
    from rlhf.registry.versions import register_policy

    with tracking.stage_run("register", {}) as run:
        register_policy(policy, name=NAME, metrics={}, lineage={}, max_new_tokens=NEW_TOKENS, run=run)


@contextmanager
def service(log: Path, batch: str) -> Iterator[str]:
    """The address of a service of the candidate, as soon as it is ready."""
    command = [sys.executable, "-m", "rlhf.serving", "--name", NAME, "--alias", "candidate", "--port", "0"]
    command += ["--poll", "3600", "--batch", batch, "--timeout", str(SECONDS)]
    with log.open("w") as output, supervised(command, directory=anchors.CHECKOUT, environ={}, output=output) as process:
        deadline = time.monotonic() + SECONDS
        while not (serves := re.search(r"(http://\S+)(?s:.*) serves", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"the service did not start: {' '.join(log.read_text().split())}")
            time.sleep(0.1)
        yield serves[1]


async def compare(addresses: dict[str, str], rounds: int) -> list[Load]:
    """Every mode with every number of clients, after a round that nobody measures."""
    questions = [problem.question for problem in generate(QUESTIONS, 1, careless_low=0, careless_high=0)]
    loads = []
    async with httpx.AsyncClient(timeout=SECONDS) as client:
        for address in addresses.values():
            await one_round(client, address, questions[:8], 8)
        for clients in CLIENTS:
            done: dict[str, list[tuple[float, list[float]]]] = {mode: [] for mode in addresses}
            for _ in range(rounds):
                for mode, address in addresses.items():
                    done[mode].append(await one_round(client, address, questions, clients))
            loads += [summary(clients, mode, measured) for mode, measured in done.items()]
    return loads


async def one_round(
    client: httpx.AsyncClient, address: str, questions: Sequence[str], clients: int
) -> tuple[float, list[float]]:
    """The seconds that all questions took `clients` who ask one after the other, and those of each answer."""
    waiting, took = iter(questions), list[float]()

    async def ask() -> None:
        for question in waiting:
            start = time.perf_counter()
            reply = await client.post(f"{address}/answers", json={"questions": [question]})
            took.append(time.perf_counter() - start)
            reply.raise_for_status()

    start = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(clients)))
    return time.perf_counter() - start, took


def summary(clients: int, mode: str, rounds: Sequence[tuple[float, Sequence[float]]]) -> Load:
    """The median round's answers a second, and percentiles over the answers of all rounds."""
    took = [seconds for _, answers in rounds for seconds in answers]
    per_second = statistics.median(len(answers) / seconds for seconds, answers in rounds)
    twentieths = statistics.quantiles(took, n=20, method="inclusive")
    return Load(clients, mode, round(per_second, 2), round(twentieths[9], 3), round(twentieths[18], 3))


def markdown(loads: Sequence[Load]) -> str:
    """The table of the page: a row for each number of clients."""
    head = "| clients | " + " | ".join(f"{mode}: answers/s | p50 | p95" for mode in MODES) + " | ratio of answers/s |"
    lines = [head, "| --- " * (3 * len(MODES) + 2) + "|"]
    for clients in CLIENTS:
        both = [next(load for load in loads if (load.clients, load.mode) == (clients, mode)) for mode in MODES]
        cells = [f"{load.per_second:.1f} | {load.p50:.2f} s | {load.p95:.2f} s" for load in both]
        lines.append(f"| {clients} | {' | '.join(cells)} | {both[0].per_second / both[1].per_second:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
