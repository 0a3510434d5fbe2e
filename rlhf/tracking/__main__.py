"""Delivers what runs have logged and no server has got.

    python -m rlhf.tracking flush              to the server for which it was logged, MLFLOW_TRACKING_URI's
    python -m rlhf.tracking flush --uri URI    all of it, to another one

Runs that a process still writes are left to it. Every point is on the server once, however often this is done.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rlhf import anchors
from rlhf.errors import UserError, run_command
from rlhf.tracking.delivery import deliver_waiting
from rlhf.tracking.journal import waiting
from rlhf.tracking.server import client, reason, without_password


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tracking", description="What runs have logged, and its way to a server.")
    commands = parser.add_subparsers(dest="command", required=True)
    to_server = commands.add_parser("flush", help="deliver what no server has got; every point is there once")
    to_server.add_argument("--uri", help="another server than MLFLOW_TRACKING_URI's: it gets all that waits")
    given = parser.parse_args(arguments)
    if given.uri:
        os.environ["MLFLOW_TRACKING_URI"] = given.uri  # MLflow looks there as well
    return run_command("tracking", lambda: flush(everything=bool(given.uri)))


def flush(everything: bool) -> int:
    """Delivers what waits, and prints how much; 1 where something is left. Raises UserError without a server."""
    uri, directory = anchors.tracking_uri(), anchors.journal_dir()
    server, count = without_password(uri), len(waiting(directory))
    if not count:
        print(f"tracking: nothing waits in {directory}")
        return 0
    try:
        done = deliver_waiting(directory, client(uri), server, everything=everything)
    except UserError:
        raise
    except Exception as error:  # of any kind: MLflow lets those of its stores, drivers and transports through
        remedy = "start it, or name another: python -m rlhf.tracking flush --uri URI"
        kept = f"{len(waiting(directory))} of {count} runs stay in {directory}"
        raise UserError(f"{server} cannot be reached ({reason(error)}): {kept}: {remedy}") from None
    print(f"tracking: {done.runs} runs with {done.points} points delivered to {server}")
    for left in done.left:
        print(f"tracking: left: {left}", file=sys.stderr)
    return int(bool(done.left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
