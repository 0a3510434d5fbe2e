"""Shows what made a registered version, and makes it again.

    python -m rlhf.lineage models:/gsm8k-policy@champion                     the version's history as a tree
    python -m rlhf.lineage models:/gsm8k-policy/3 --json                     all of it, for machines
    python -m rlhf.lineage models:/gsm8k-policy@champion --reproduce DIR     train it again in DIR, and compare

`--reproduce` ends with 0 where the policy is the same, or where another kind of machine made one of the same accuracy.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf import anchors, process
from rlhf.errors import run_command
from rlhf.lineage import history as histories
from rlhf.lineage import workspace
from rlhf.lineage.compare import Comparison, Made, compare
from rlhf.lineage.history import History
from rlhf.lineage.tree import as_json, as_lines, as_rich, tree


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="lineage", description="What made a registered version; making it again.")
    parser.add_argument("version", help="models:/NAME@ALIAS or models:/NAME/NUMBER")
    parser.add_argument("--json", action="store_true", help="for machines, with all params and changes")
    parser.add_argument("--reproduce", metavar="DIR", type=Path, help="make it again in this directory, and compare")
    given = parser.parse_args(arguments)
    process.interrupt_on(signal.SIGTERM)
    interrupted = "interrupted: the same command goes on" if given.reproduce else "interrupted"
    return run_command("lineage", lambda: _run(given), interrupted)


def _run(given: argparse.Namespace) -> int:
    history, found = histories.read(given.version)
    if given.reproduce:
        outcome = reproduce(history, found, given.reproduce.absolute())
        print(json.dumps(asdict(outcome)) if given.json else "\n  ".join([outcome.verdict, *outcome.details]))
        return 0 if outcome.reproduced else 1
    if given.json:
        print(as_json(history))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(as_rich(tree(history, usual_params(history))))
    else:
        print("\n".join(as_lines(tree(history, usual_params(history)))))
    return 0


def reproduce(history: History, found: dict[str, bytes], directory: Path) -> Comparison:
    """Makes the version again in `directory` and compares; raises UserError where it cannot be made."""
    workspace.prepare(history, found, directory)
    workspace.require_same_inputs(found, directory)
    python, missing = workspace.environment(directory)
    if missing:
        print(f"lineage: other packages than here, in {python.parents[1]}: {'; '.join(missing)}", file=sys.stderr)
    workspace.make_again(python, directory)
    outs = {path: md5 for stage in history.stages for path, md5 in stage.outs.items()}
    return compare(Made(outs, history.machine, history.evaluation), workspace.made(directory))


def usual_params(history: History) -> dict[str, Any]:
    """The params.yaml of the version's commit; empty where this repository has no such commit."""
    import yaml

    text = anchors.git("show", f"{history.commit}:params.yaml") if history.commit else None
    return yaml.safe_load(text) if text else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
