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
from rlhf.errors import UsageError, UserError, run_command
from rlhf.tracking.delivery import deliver_waiting
from rlhf.tracking.journal import waiting
from rlhf.tracking.server import client, reason, without_password


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tracking", description=__doc__, formatter_class=style)
    commands = parser.add_subparsers(dest="command", required=True)
    flushing = commands.add_parser("flush", help="deliver what waits")
    flushing.add_argument("--uri", help="another server than MLFLOW_TRACKING_URI's")
    given = parser.parse_args(arguments)
    return _flush_to(given.uri)


def _flush_to(uri: str | None) -> int:
    if uri is None:
        return flush(everything=False)
    if "://" not in uri:  # an empty one would be the default
        raise UsageError(
            f"--uri {uri}: no tracking server: write http://HOST:PORT, sqlite:////PATH or postgresql://..."
        )
    os.environ["MLFLOW_TRACKING_URI"] = uri  # MLflow looks there as well
    return flush(everything=True)


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
    sys.exit(run_command("tracking", lambda: main(sys.argv[1:])))
