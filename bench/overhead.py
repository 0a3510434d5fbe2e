"""Measures what a flow adds to plain `dvc repro`: the same pipeline from scratch, both ways, in turns.

    python -m bench.overhead [--scale smoke] [--rounds 3]

Two clones of this checkout's last commit, each with a DVC cache of its own, compute the same params; a Prefect server
and an MLflow server run all the time, and stages log to the latter both ways. A round's two dvc.lock files have to be
equal. Writes bench/results/overhead.csv and the table in docs/scheduling.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.workspaces import RESULTS, with_marked, write_csv, write_text
from flows import servers
from rlhf import anchors
from rlhf.errors import UserError, run_command
from rlhf.tracking.sections import SECTIONS
from tasks.processes import supervised

WAYS = ("dvc repro", "flow")
STAGES = len(SECTIONS)
SHARE, SECONDS_A_STAGE = 0.1, 3.0
"""What a flow may add: a share of the plain time, and so much a stage."""

TABLE = RESULTS / "overhead.csv"
PAGE = anchors.CHECKOUT / "docs" / "scheduling.md"


class Took(NamedTuple):
    """The seconds that one way took in one round."""

    round: int
    way: str
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.overhead", description="Measure what a flow adds to plain dvc repro.")
    parser.add_argument("--scale", default="smoke", help="scale of the pipeline (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each with another seed (%(default)s)")
    given = parser.parse_args(arguments)
    return run_command("bench.overhead", lambda: measure(given.scale, given.rounds))


def measure(scale: str, rounds: int) -> None:
    """Runs both ways in turns, after a round that nobody measures, and writes what was measured."""
    with TemporaryDirectory() as place, ExitStack() as running:
        clones = {way: clone(Path(place), way.replace(" ", "-")) for way in WAYS}
        address = mlflow(running, Path(place))
        environ = {way: places(clones[way]) | {"MLFLOW_TRACKING_URI": address} for way in WAYS}
        environ["flow"] |= {"PREFECT_API_URL": prefect(running, Path(place)), "PREFECT_HOME": f"{place}/prefect"}
        took = []
        for number in range(rounds + 1):
            words = [f"scale={scale}", f"seed={number}"]
            for way in WAYS:
                seconds = timed(way, clones[way], words, environ[way])
                print(f"{'warm-up' if number == 0 else f'round {number}'}: {way}: {seconds:.1f} s", flush=True)
                took += [Took(number, way, round(seconds, 2))] if number else []
            require_equal(clones)
    write_csv(TABLE, [Took._fields, *took])
    write_text(PAGE, with_marked(PAGE.read_text(), "overhead", markdown(took)))


def clone(place: Path, name: str) -> Path:
    """A clone of this checkout's last commit, with its environment."""
    target = place / name
    subprocess.run(["git", "clone", "--quiet", str(anchors.CHECKOUT), str(target)], check=True)
    (target / ".venv").symlink_to((anchors.CHECKOUT / ".venv").resolve())
    return target


def places(directory: Path) -> dict[str, str]:
    """The environment of what runs in a clone: nothing is shared with this checkout."""
    own = {"STATE": ".state", "JOURNAL": ".journal", "MIRROR": ".mirror"}
    return {f"RLHF_{name}_DIR": str(directory / place) for name, place in own.items()}


def timed(way: str, directory: Path, words: Sequence[str], environ: dict[str, str]) -> float:
    """The seconds of one pipeline from the command to its end; raises UserError where it fails."""
    if way == "dvc repro":
        run([sys.executable, "-m", "rlhf.config", "compose", *words], directory, environ)
        command = [sys.executable, "-m", "dvc", "repro"]
    else:
        command = [sys.executable, "-m", "flows.pipeline", *words]
    start = time.perf_counter()
    run(command, directory, environ)
    return time.perf_counter() - start


def run(command: Sequence[str], directory: Path, environ: dict[str, str]) -> None:
    """Runs a command in a clone; raises UserError with its last words where it fails."""
    with supervised(command, directory=directory, environ=environ) as process:
        assert process.stdout is not None
        said = process.stdout.read()  # not `communicate`, which closes the lifeline
        process.wait()
    if process.returncode:
        raise UserError(f"{' '.join(command[1:])} failed: {' '.join(said.split()[-60:])}")


def require_equal(clones: dict[str, Path]) -> None:
    """Raises UserError unless both ways came to the same outputs, hash for hash."""
    locks = {way: (directory / "dvc.lock").read_bytes() for way, directory in clones.items()}
    if len(set(locks.values())) > 1:
        raise UserError("the flow's dvc.lock is not that of dvc repro: they did not do the same work")


def prefect(running: ExitStack, place: Path) -> str:
    """The API of a Prefect server for the measurement, as soon as it answers."""
    port = servers.free_port()
    environ = {"PREFECT_HOME": str(place / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    running.enter_context(servers.prefect_server(port, environ)).wait()
    return f"http://{servers.HOST}:{port}/api"


def mlflow(running: ExitStack, place: Path) -> str:
    """The address of an MLflow server for the measurement, as soon as it answers."""
    port = str(servers.free_port())
    command = [sys.executable, "-m", "mlflow", "server", "--host", servers.HOST, "--port", port, "--workers", "1"]
    command += ["--artifacts-destination", str(place / "mlartifacts")]
    environ = {"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{place / 'mlflow.db'}"}
    address = f"http://{servers.HOST}:{port}"
    running.enter_context(servers.server("overhead-mlflow", command, f"{address}/health", environ)).wait()
    return address


def markdown(took: Sequence[Took]) -> str:
    """The table of the page, with what is allowed."""
    medians = {way: statistics.median(one.seconds for one in took if one.way == way) for way in WAYS}
    plain, flow = medians["dvc repro"], medians["flow"]
    allowed = SHARE * plain + SECONDS_A_STAGE * STAGES
    rounds = len(took) // len(WAYS)
    lines = [
        "| `dvc repro` | flow | added | allowed: 10 % and 3 s a stage |",
        "| --- | --- | --- | --- |",
        f"| {plain:.1f} s | {flow:.1f} s | {flow - plain:.1f} s, {(flow - plain) / STAGES:.1f} s a stage "
        f"| {allowed:.1f} s |",
    ]
    return "\n".join([*lines, "", f"Medians of {rounds} rounds in turns; every round gave the same hashes both ways."])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
