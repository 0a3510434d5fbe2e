"""Measures rollout, update, PPO iteration and evaluation beside their peers, and how each of them grows.

    python -m bench.performance [--rows rollout,update] [--rounds 3] [--again] [--data DIRECTORY] [--try]

The contenders of a row take turns, each measurement in a process of its own; the machine's peaks are measured in front
of each row. A row that is finished, for the code and the machine as they are, is not measured again without --again.
TRL and lm-evaluation-harness run in an environment of their own, made from bench/peers.lock; where that fails, their
cells stay empty. Writes bench/results/performance.csv, the tables in docs/performance.md and docs/img/performance.png;
with --try, a tiny model in seconds a row, and nothing but files in .cache/performance/try.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.performance import records, table
from bench.performance.cases import FULL, TRY, Row, rows
from bench.performance.measuring import Machine
from bench.workspaces import RESULTS, with_marked, write_picture, write_text
from rlhf import anchors, locks, process
from rlhf.errors import UsageError, run_command

PLACE = anchors.CHECKOUT / ".cache" / "performance"
TABLE = RESULTS / "performance.csv"
PAGE = anchors.CHECKOUT / "docs" / "performance.md"
PICTURE = anchors.CHECKOUT / "docs" / "img" / "performance.png"


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.performance", description="Measure beside the peers.")
    parser.add_argument("--rows", help="only these rows, or those whose names begin so: rollout,iteration-1,scaling")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every row (%(default)s)")
    parser.add_argument("--again", action="store_true", help="measure finished rows again")
    parser.add_argument("--data", type=Path, help="directory of train.jsonl and test.jsonl in GSM8K's format")
    parser.add_argument("--try", action="store_true", dest="trial", help="a tiny model, a few seconds a row")
    given = parser.parse_args(arguments)
    return run_command("bench.performance", lambda: measure(given))


def measure(given: argparse.Namespace) -> None:
    """Measures every chosen row that is not finished, and writes tables and plot after each."""
    scale = TRY if given.trial else FULL
    words = list(scale.words)
    if given.data:
        words += ["data=files", f"data.reads={given.data.resolve()}"]
    every = rows(scale)
    chosen = select(every, given.rows)
    place = PLACE / "try" if given.trial else PLACE
    path = place / "performance.csv" if given.trial else TABLE
    process.interrupt_on(signal.SIGTERM)
    with locks.exclusive(place / "lock", "measures here: wait for it or stop it"):
        machine = Machine(place, words, count=max(scale.problems, *scale.rollouts), rounds=given.rounds)
        for row in chosen:
            known = records.read(path)
            if not given.again and machine.finished(row, known):
                print(f"{row.name}: finished before", flush=True)
                continue
            new = machine.measured(row)
            known = records.replaced(known, row.name, new, [each.name for each in every])
            records.write(path, known)
            publish(every, known, machine, given.trial)


def select(every: Sequence[Row], names: str | None) -> list[Row]:
    """The rows that the command line names; raises UsageError for a name that no row has."""
    if names is None:
        return list(every)
    words = names.split(",")
    for word in words:
        if not any(_named(row, word) for row in every):
            raise UsageError(f"--rows: no row {word!r}: there are {', '.join(row.name for row in every)}")
    return [row for row in every if any(_named(row, word) for word in words)]


def _named(row: Row, word: str) -> bool:
    return row.name == word or row.name.startswith(f"{word}-")


def publish(every: Sequence[Row], known: Sequence[records.Record], machine: Machine, trial: bool) -> None:
    """Writes tables and plot into the page; a trial's tables go to its own directory."""
    text = table.markdown(every, known, machine.name, {row.name: machine.key(row) for row in every})
    if trial:
        write_text(PLACE / "try" / "performance.md", text + "\n")
        write_picture(PLACE / "try" / "performance.png", table.figure(every, known))
        return
    write_text(PAGE, with_marked(PAGE.read_text(), "performance", text))
    write_picture(PICTURE, table.figure(every, known))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
