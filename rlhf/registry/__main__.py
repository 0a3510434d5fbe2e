"""Moves the champion by hand, and shows what is registered.

    python -m rlhf.registry list
    python -m rlhf.registry promote VERSION --reason "why"
    python -m rlhf.registry rollback --reason "why"

The model is the one that params.yaml names (registry.name), or --name's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlhf import config
from rlhf.errors import run_command
from rlhf.registry import champion
from rlhf.registry.overview import overview


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="registry", description="Move the champion by hand, show what is registered.")
    parser.add_argument("--name", help="registered model; registry.name of params.yaml if left out")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every version, and every move of the champion")
    promote = commands.add_parser("promote", help="make a version champion")
    promote.add_argument("version", help="its number")
    rollback = commands.add_parser("rollback", help="make the previous champion champion again")
    for command in (promote, rollback):
        command.add_argument("--reason", required=True, help="why: it is recorded with the move")
    given = parser.parse_args(arguments)
    return run_command("registry", lambda: print(_run(given)))


def _run(given: argparse.Namespace) -> str:
    name = given.name or config.load().registry.name
    if given.command == "promote":
        return champion.promote(name, given.version, given.reason)
    if given.command == "rollback":
        return champion.rollback(name, given.reason)
    return overview(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
