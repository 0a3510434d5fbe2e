"""Moves the champion by hand, shows what is registered, evaluates a version again.

    python -m rlhf.registry list
    python -m rlhf.registry promote VERSION --reason "why"
    python -m rlhf.registry rollback --reason "why"
    python -m rlhf.registry evaluate VERSION --split test

A VERSION is a number or an alias. The model is the one that params.yaml names (registry.name), or --name's.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlhf import config, process
from rlhf.errors import run_command
from rlhf.registry import champion
from rlhf.registry.overview import overview


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="registry", description="Move the champion, show and evaluate versions.")
    parser.add_argument("--name", help="registered model; registry.name of params.yaml if left out")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every version, and every move of the champion")
    promote = commands.add_parser("promote", help="make a version champion")
    promote.add_argument("version", help="its number, or an alias that it has")
    rollback = commands.add_parser("rollback", help="make the previous champion champion again")
    for command in (promote, rollback):
        command.add_argument("--reason", required=True, help="why: it is recorded with the move")
    evaluate = commands.add_parser("evaluate", help="evaluate a version again; an MLflow run keeps the result")
    evaluate.add_argument("version", help="its number, or an alias that it has")
    evaluate.add_argument("--split", choices=["validation", "gate", "test"], default="test", help="test if left out")
    evaluate.add_argument("--cache", type=Path, help="DVC's files/md5, for problems that this checkout does not have")
    evaluate.add_argument("--other-data", action="store_true", help="take this checkout's problems, whatever they are")
    evaluate.add_argument("--json", action="store_true", help="for machines")
    given = parser.parse_args(arguments)
    process.interrupt_on(signal.SIGTERM)
    return run_command("registry", lambda: print(_run(given)))


def _run(given: argparse.Namespace) -> str:
    name = given.name or config.load().registry.name
    if given.command == "promote":
        return champion.promote(name, given.version, given.reason)
    if given.command == "rollback":
        return champion.rollback(name, given.reason)
    if given.command == "evaluate":
        return _evaluate(name, given)
    return overview(name)


def _evaluate(name: str, given: argparse.Namespace) -> str:
    from rlhf import runtime

    params = config.load()
    runtime.configure(params.runtime, params.seed)
    from rlhf.registry.evaluate import evaluate

    done = evaluate(name, given.version, given.split, params, Path.cwd(), given.cache, given.other_data)
    return json.dumps(asdict(done)) if given.json else f"{done.line}; MLflow run {done.run_id}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
