"""A second place for a run's metrics: TensorBoard's event files, or Weights & Biases.

It is a convenience beside MLflow: its own thread writes it, and where it fails the run goes on without it.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from rlhf import anchors
from rlhf.errors import UsageError, first_line
from rlhf.params import MirrorKind
from rlhf.redaction import redact
from rlhf.tracking.journal import Record

WAIT_SECONDS = 20.0
"""How long Weights & Biases may take to begin a run, and to send the rest of it at its end."""
CLOSE_SECONDS = 2 * WAIT_SECONDS + 5
"""How long the end of a run waits for its mirror."""


class Points(NamedTuple):
    """Values of one step; `time` in milliseconds since the epoch."""

    values: Mapping[str, float]
    step: int
    time: int


class Target(Protocol):
    """What a mirror writes to; only the mirror's thread calls it."""

    def write(self, points: Points) -> None:
        """Writes one step's values, and has them on disk or on their way when it returns."""

    def close(self) -> None:
        """Ends the run there."""


class Mirror:
    """Copies a run's points; none of its methods but `close` waits for anything."""

    def __init__(self, kind: MirrorKind, key: str, name: str, group: str, params: Mapping[str, object]) -> None:
        """`group` is the key of the pipeline's run, if there is one."""
        self._kind = kind
        self._queue: SimpleQueue[Points | None] = SimpleQueue()
        self._run = key, name, group, dict(params)
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        """Hands over a record of the journal, of which the points are copied."""
        if record["op"] == "points":
            self._queue.put(Points(record["values"], record["step"], record["time"]))

    def close(self) -> None:
        """Waits, but not for long, until everything is written."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._say(f"not done {CLOSE_SECONDS:.0f} s after the run's end")

    def _work(self) -> None:
        try:
            place = anchors.mirror_dir() / self._kind
            place.mkdir(parents=True, exist_ok=True)
            target = _target(self._kind, place, *self._run)
            while (points := self._queue.get()) is not None:
                target.write(points)
            target.close()
        except Exception as error:  # of any kind: it is other people's code, and no run may end by it
            self._say(first_line(error))

    def _say(self, fault: str) -> None:
        line = redact(f"tracking: tracking.mirror={self._kind}: {fault}: the run goes on without it")
        print(line, file=sys.stderr, flush=True)


def require(kind: MirrorKind) -> None:
    """Raises UsageError where the package of a mirror is missing."""
    if kind != "none" and find_spec(kind) is None:
        raise UsageError(
            f"tracking.mirror={kind}: the package {kind} is missing: install the project's extra {kind}, "
            "or set tracking.mirror=none"
        )


def _target(kind: MirrorKind, place: Path, key: str, name: str, group: str, params: Mapping[str, object]) -> Target:
    if kind == "tensorboard":
        return TensorBoard(place / (group or key) / (name if group else ""), key)
    return WeightsAndBiases(place, key, name, group or key, params)


class TensorBoard:
    """Event files, for `tensorboard --logdir`."""

    def __init__(self, directory: Path, key: str) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory), filename_suffix=f".{key}")
        self._is_new = True

    def write(self, points: Points) -> None:
        """As `Target` has it; the first step of a process replaces what an earlier one wrote from there on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        moment = points.time / 1000
        if self._is_new:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=moment, step=points.step, session_log=start))
            self._is_new = False
        values = [Summary.Value(tag=name, simple_value=value) for name, value in points.values.items()]
        self._writer.add_event(Event(wall_time=moment, step=points.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """As `Target` has it."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases: on disk, for `wandb sync`, unless WANDB_MODE or WANDB_API_KEY say otherwise."""

    def __init__(self, place: Path, key: str, name: str, group: str, params: Mapping[str, object]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if "WANDB_API_KEY" not in os.environ:
            os.environ.setdefault("WANDB_MODE", "offline")
        import wandb

        for earlier in place.glob(f"wandb/offline-run-*-{key}"):  # a resumed run logs all of its iterations again
            shutil.rmtree(earlier)
        self._row = 0
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gsm8k-rlhf"),
            dir=str(place),
            id=key,
            name=name,
            group=group,
            job_type=name,
            resume="allow",
            reinit="create_new",
            config=dict(params),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                init_timeout=WAIT_SECONDS,
                finish_timeout=WAIT_SECONDS,
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, points: Points) -> None:
        """As `Target` has it.

        The package's own step must not go back, as ours does: it counts the rows, and a server that has some of a
        resumed run's leaves those out.
        """
        self._run.log({**points.values, "step": points.step, "_timestamp": points.time / 1000}, step=self._row)
        self._row += 1

    def close(self) -> None:
        """As `Target` has it."""
        self._run.finish()
