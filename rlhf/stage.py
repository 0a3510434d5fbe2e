"""What the stages share: parsing the command line, where outputs go, the tracking run, one line for every error.

A stage is `main(stage)`. It reads through `stage.input`, writes through `stage.output` and reports through
`stage.log`. Outputs are written aside and renamed into place after `main` returns, so that a killed or failed stage
leaves none.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from rlhf import config, faults, hashes, runtime
from rlhf.errors import UserError
from rlhf.params import Params

if TYPE_CHECKING:
    from rlhf.tracking import Run

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# Which stage writes a path that another reads: for the message where it is missing.
WRITERS = {
    "data/prepared": "prepare_data",
    "models/fetched": "fetch_sft",
    "models/sft": "finetune_sft",
    "data/preferences": "collect_preferences",
    "models/reward": "train_reward",
    "models/policy": "train_ppo",
    "metrics/ppo.json": "train_ppo",
    "plots/ppo.csv": "train_ppo",
    "metrics/evaluation.json": "evaluate",
}


@dataclass
class Stage:
    """One run of one stage; `place` is where its outputs go, the workspace itself when DVC runs it."""

    name: str
    params: Params
    log: Run
    workspace: Path
    place: Path
    held: ExitStack
    """What the stage holds until its outputs are in place, such as the lock on its training state."""
    _staging: Path
    _outputs: list[str] = field(default_factory=list)
    _afterwards: list[Callable[[], None]] = field(default_factory=list)

    def input(self, path: str) -> Path:
        """The input at `path` in the workspace; raises UserError that names the stage that makes it."""
        found = self.workspace / path
        if not found.exists():
            writer = next((stage for made, stage in WRITERS.items() if path.startswith(made)), None)
            hint = f"run dvc repro {writer}" if writer else "check the path"
            raise UserError(f"{path} is missing: {hint}")
        return found

    def output(self, path: str) -> Path:
        """A path to write the output `path` to; it becomes visible under its name once the stage is done."""
        if path not in self._outputs:
            self._outputs.append(path)
        target = self._staging / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def scratch(self, path: str) -> Path:
        """An empty directory for what people look at and DVC does not hash."""
        target = self.place / path
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        return target

    def after_publishing(self, action: Callable[[], None]) -> None:
        """Calls `action` once the outputs are in place, and never where the stage failed."""
        self._afterwards.append(action)

    def publish(self) -> dict[str, str]:
        """Renames the outputs into place and returns the hash that DVC gives each.

        What was there before is renamed aside, not deleted in place: no moment shows half a directory.
        """
        missing = [path for path in self._outputs if not (self._staging / path).exists()]
        if missing:
            raise RuntimeError(f"{self.name} announced {missing[0]} and did not write it")
        made = {path: hashes.dvc_md5(self._staging / path) for path in self._outputs}
        faults.reach("publish.begun")
        with _signals_ignored():
            for path in self._outputs:
                target = self.place / path
                if target.exists():
                    _rename(target, self._staging / ".replaced" / path)
                    faults.reach("publish.aside")
                _rename(self._staging / path, target)
                faults.reach("publish.renamed")
            faults.reach("publish.ended")
            for action in self._afterwards:
                action()
            faults.reach("publish.discarded")
        return made


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Writes JSON as every metrics file here is written: the same values, the same bytes."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n")


def run_stage(name: str, main: Callable[[Stage], None], arguments: Sequence[str] | None = None) -> None:
    """The entry point of every stage: runs `main` and exits with 0, or with one line and 1 (2 for usage)."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
        signal.signal(signal.SIGINT, _interrupt)
    try:
        _run(name, main, sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        _stop(name, str(error), error.exit_code)
    except KeyboardInterrupt:
        _stop(name, "interrupted: nothing half-written is left", 1)
    except Exception as error:
        _stop(name, _disk_fault(error) or _unexpected(name, error), 1)


def _run(name: str, main: Callable[[Stage], None], arguments: Sequence[str]) -> None:
    from rlhf.tracking import stage_run

    workspace = Path.cwd()
    params = config.load(arguments)
    runtime.configure(params.runtime, params.seed)
    place = workspace
    if arguments:
        key = sha256(params.model_dump_json().encode()).hexdigest()[:12]
        place = workspace / "runs" / name / key
        print(f"{name}: with overrides the outputs go to {place.relative_to(workspace)}, not to DVC's", flush=True)
    with _staging(workspace, name) as staging, ExitStack() as held, stage_run(name, params.model_dump()) as log:
        stage = Stage(name, params, log, workspace, place, held, staging)
        main(stage)
        log.tag_outs(stage.publish())


@contextmanager
def _staging(workspace: Path, name: str) -> Iterator[Path]:
    """A fresh directory on the workspace's file system, so that a rename into place is atomic."""
    partial = workspace / ".partial"
    partial.mkdir(exist_ok=True)
    staging = Path(mkdtemp(prefix=f"{name}-{os.getpid()}-", dir=partial))  # `make gc` looks for the process
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Keeps Ctrl-C and SIGTERM out of the moment in which several outputs are renamed."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _disk_fault(error: Exception) -> str | None:
    """What to tell of an error that comes from a full or read-only disk; None for any other error.

    Libraries in Rust and C++ raise errors of their own, with the system's words for the cause.
    """
    if isinstance(error, OSError) and error.errno in (*DISK_FAULTS, errno.EACCES):
        fault: int | None = error.errno
    else:
        fault = next((number for number in DISK_FAULTS if os.strerror(number) in str(error)), None)
    if fault is None:
        return None
    place = getattr(error, "filename", None) or "the disk of this workspace"
    return f"{place}: {os.strerror(fault)}: make room or access there and run it again; nothing half-written is left"


def _unexpected(name: str, error: Exception) -> str:
    """Keeps the traceback of an unexpected error in a file and says where."""
    log = Path("runs") / f"{name}-error.log"
    try:
        log.parent.mkdir(exist_ok=True)
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError as fault:
        log = Path(f"no log ({fault.strerror})")
    return f"{type(error).__name__}: {config.first_line(error)}: not expected, please report it with {log}"


def _stop(name: str, message: str, code: int) -> None:
    print(f"{name}: {' '.join(message.splitlines())}", file=sys.stderr, flush=True)
    sys.exit(code)
