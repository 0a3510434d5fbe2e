"""Serves the registered champion on HTTP, and whichever version becomes champion later, until Ctrl-C or SIGTERM.

    python -m rlhf.serving [--port 8000] [--alias champion]

docs/serving.md has the interface.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf import config, process
from rlhf.errors import UserError, run_command
from rlhf.registry.answer import fetch, wanted_version, worker_command
from rlhf.registry.champion import CHAMPION
from rlhf.serving.app import Limits, create_app
from rlhf.serving.batches import Queue
from rlhf.serving.follower import Follower
from rlhf.serving.policies import Version, VersionProcess

LOADING_SECONDS = 600.0


class Registry:
    """The versions of a registered model that hold `alias`, each loaded into a process of its own."""

    def __init__(self, name: str, alias: str) -> None:
        self._name, self._alias = name, alias

    async def wanted(self) -> Version:
        """The version that holds the alias now; raises UserError."""
        return Version(self._name, await asyncio.to_thread(wanted_version, self._name, self._alias), self._alias)

    async def load(self, version: Version) -> VersionProcess:
        """The version in a process that answers; raises UserError or Failed."""
        files = TemporaryDirectory(prefix="policy-", ignore_cleanup_errors=True)
        try:
            directory = await asyncio.to_thread(fetch, version.name, version.number, Path(files.name))
        except BaseException:
            files.cleanup()
            raise
        return await VersionProcess.start(worker_command(directory), LOADING_SECONDS, files)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="serving", description="Serve the registered champion on HTTP, and follow the alias when it moves."
    )
    default = Limits()
    parser.add_argument("--name", help="registered model; registry.name of params.yaml if left out")
    parser.add_argument("--alias", default=CHAMPION, help="whose version serves (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for a free one (%(default)s)")
    parser.add_argument("--poll", type=_number, default=5.0, help="seconds between looks at the alias (%(default)s)")
    parser.add_argument("--timeout", type=_number, default=default.seconds, help="seconds a request (%(default)s)")
    counts = {
        "--max-question": (default.question_characters, "characters of a question"),
        "--max-questions": (default.questions, "questions of a request"),
        "--max-samples": (default.samples, "samples a question"),
        "--max-new-tokens": (default.new_tokens, "tokens of a response"),
        "--queue": (64, "requests that may wait"),
        "--batch": (64, "responses sampled at once"),
    }
    for option, (value, meaning) in counts.items():
        parser.add_argument(option, type=_count, default=value, help=f"most {meaning} (%(default)s)")
    given = parser.parse_args(arguments)
    process.interrupt_on(signal.SIGTERM)
    return run_command("serving", lambda: serve(given))


def serve(given: argparse.Namespace) -> None:
    """Serves until it is interrupted; raises UserError where the address is taken."""
    import uvicorn

    name = given.name or config.load().registry.name
    limits = Limits(given.max_question, given.max_questions, given.max_samples, given.max_new_tokens, given.timeout)
    follower = Follower(Registry(name, given.alias), given.poll, say=_say)
    queue = Queue(lambda: follower.current, given.batch, given.queue, limits.seconds)
    with suppress(KeyboardInterrupt), _listen(given.host, given.port) as listener:
        _say(f"http://{given.host}:{listener.getsockname()[1]} will answer as soon as {given.alias} is loaded")
        settings = uvicorn.Config(
            create_app(follower, queue, limits),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(limits.seconds) + 1,
        )
        uvicorn.Server(settings).run(sockets=[listener])
    _say("stopped")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"{host}:{port}: {error}: choose another --host or --port") from None


def _count(text: str) -> int:
    with suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1 on")


def _number(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: write a number above 0")


def _say(line: str) -> None:
    print(f"serving: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
