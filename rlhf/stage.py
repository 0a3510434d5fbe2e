"""What the stages share: parsing the command line, where outputs go, the tracking run, one line for every error.

A stage is `main(stage)`. It reads through `stage.input`, writes through `stage.output` and reports through
`stage.log`. Outputs are written aside and renamed into place after `main` returns, so that a killed or failed stage
leaves none.
"""

from __future__ import annotations

import errno
import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf import anchors, config, distributed, faults, hashes, hosts, locks, machine, process, resuming, runtime
from rlhf.distributed import ALONE, Ranks
from rlhf.errors import UserError, run_command
from rlhf.hosts import Hosts
from rlhf.params import Params

if TYPE_CHECKING:
    from rlhf.tracking import Run

T = TypeVar("T")

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
    "plots/panel.csv": "train_ppo",
    "metrics/evaluation.json": "evaluate",
    "reports/evaluation/gate.csv": "evaluate",
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
    _outputs: dict[str, Path] = field(default_factory=dict)
    _afterwards: list[Callable[[], None]] = field(default_factory=list)
    ranks: Ranks = ALONE
    """This process among those that run the stage; the first one alone writes outputs."""

    def input(self, path: str) -> Path:
        """The input at `path` in the workspace; raises UserError that names the stage that makes it."""
        found = self.workspace / path
        if not found.exists():
            raise UserError(f"{path} is missing: {_remedy(path)}")
        return found

    def read_json(self, path: str, parse: Callable[[Any], T]) -> T:
        """`read_json` of an input in the workspace."""
        return read_json(self.workspace, path, parse)

    def read_text(self, path: str, parse: Callable[[str], T]) -> T:
        """`read_text` of an input in the workspace."""
        return read_text(self.workspace, path, parse)

    def output(self, path: str) -> Path:
        """A path to write the output `path` to; it becomes visible under its name once the stage is done."""
        if path not in self._outputs:
            self._outputs[path] = self._staging_for(self.place / path)
        written = self._outputs[path] / path
        written.parent.mkdir(parents=True, exist_ok=True)
        return written

    def _staging_for(self, target: Path) -> Path:
        """The stage's own directory, or one beside `target` where that is a mount or link to another file system."""
        directory = next(parent for parent in target.parents if parent.is_dir())
        if _can_rename(self._staging, directory):
            return self._staging
        return self.held.enter_context(_staging(directory, self.name))

    def scratch(self, path: str) -> Path:
        """An empty directory under runs/ for what people look at and DVC neither hashes nor restores."""
        target = self.workspace / "runs" / self.name / path
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        return target

    def resume_from(self, directory: Path) -> None:
        """Holds the directory in which a killed run left its state, and goes on with that one's tracked run.

        The directory goes once the outputs are in place. Raises UserError where another run holds it.
        """
        self.held.enter_context(resuming.exclusive(directory))
        self.after_publishing(lambda: resuming.discard(directory))
        self.log.resume(directory / "run")

    def after_publishing(self, action: Callable[[], None]) -> None:
        """Calls `action` once the outputs are in place, and never where the stage failed."""
        self._afterwards.append(action)

    def publish(self) -> dict[str, str]:
        """Renames the outputs into place and returns the hash that DVC gives each.

        What was there before is renamed aside, not deleted in place: no moment shows half a directory.
        """
        missing = [path for path, staging in self._outputs.items() if not (staging / path).exists()]
        if missing:
            raise RuntimeError(f"{self.name} announced {missing[0]} and did not write it")
        made = {path: hashes.dvc_md5(staging / path) for path, staging in self._outputs.items()}
        faults.reach("publish.begun")
        _ignore_signals()
        for path, staging in self._outputs.items():
            target = self.place / path
            if target.exists():
                _rename(target, staging / ".replaced" / path)
                faults.reach("publish.aside")
            _rename(staging / path, target)
            faults.reach("publish.renamed")
        faults.reach("publish.ended")
        for action in self._afterwards:
            action()
        faults.reach("publish.discarded")
        return made


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Writes JSON as every metrics file here is written: the same values, the same bytes."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_json(workspace: Path, path: str, parse: Callable[[Any], T]) -> T:
    """What `parse` takes out of the JSON file `path` of a workspace; raises UserError as `read_text` does."""
    return read_text(workspace, path, lambda text: parse(json.loads(text)))


def read_text(workspace: Path, path: str, parse: Callable[[str], T]) -> T:
    """What `parse` takes out of the text file `path` of a workspace.

    Raises UserError that names the stage that makes the file where it is missing, broken, or not what `parse` expects.
    """
    try:
        return parse((workspace / path).read_bytes().decode())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {_remedy(path)}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        fault = type(error).__name__
        raise UserError(f"{path}: not as its stage writes it ({fault}): {_remedy(path)}") from None


def _remedy(path: str) -> str:
    """What to do where an input is missing or broken."""
    writer = next((stage for made, stage in WRITERS.items() if path.startswith(made)), None)
    return f"run dvc repro {writer}" if writer else "check the path"


def run_stage(
    name: str,
    main: Callable[[Stage], None],
    arguments: Sequence[str] | None = None,
    processes: Callable[[Params], int] | None = None,
) -> None:
    """The entry point of every stage: runs `main` and exits with 0, or with one line and 1 (2 for usage).

    Where `processes` tells more than one, and torchrun did not start them, those of this host are started here.
    """
    process.interrupt_on(signal.SIGTERM)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
        process.interrupt_on(signal.SIGINT)
    given = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(given):
        usage = f"python -m stages.{name} [key=value ...]    (python -m rlhf.config help lists every key)"
        print(f"{(main.__globals__.get('__doc__') or '').strip()}\n\n    {usage}")
        return

    def command() -> int:
        try:
            return _run(name, main, given, processes)
        except KeyboardInterrupt:
            if distributed.is_rank():  # whoever started it says so
                return distributed.INTERRUPTED
            raise

    code = run_command(name, command, "interrupted: nothing half-written is left", distributed.has_last_word)
    process.leave_with(code)
    if code:
        sys.exit(code)


def _run(
    name: str,
    main: Callable[[Stage], None],
    arguments: Sequence[str],
    processes: Callable[[Params], int] | None,
) -> int:
    from rlhf.tracking import SECTIONS, params_of

    workspace = Path.cwd()
    params = config.load(arguments)
    size = processes(params) if processes else 1
    if processes and not distributed.is_rank():
        among = hosts.from_environment()
        among.processes_here(size)  # several hosts cannot share one process
        if size > 1:
            return _launch(["-m", f"stages.{name}", *arguments], size, among)
    if "runtime" in SECTIONS[name]:  # no other stage is to pay for importing torch
        runtime.configure(params.runtime, params.seed)
    place = override_place(workspace, name, params) if arguments else workspace
    gpu = size > 1 and runtime.device(params.runtime).type == "cuda"
    with (
        distributed.joined(size, gpu) as ranks,
        _staging(workspace, name) as staging,
        ExitStack() as held,
        _tracked(name, params, ranks) as log,
    ):
        if arguments:
            print(f"{name}: with overrides the outputs go to {place.relative_to(workspace)}, not to DVC's", flush=True)
        log.set_tags(machine.tags())
        stage = Stage(name, params, log, workspace, place, held, staging, ranks=ranks)
        process.end_loading()
        main(stage)
        # DVC records the params as they are when the stage has ended, and would take this result for theirs.
        if not arguments and params_of(name, config.load().model_dump()) != params_of(name, params.model_dump()):
            raise UserError(f"{config.PARAMS_FILE} was changed while {name} ran: run it again")
        if ranks.first:
            log.tag_outs(stage.publish())
    return 0


def _launch(words: Sequence[str], size: int, among: Hosts) -> int:
    """Runs Python with these words as this host's processes, and tells what to run on the others."""
    if among.number == 0:
        for number, line in enumerate(among.lines([_in_any_checkout(sys.executable), *words]), start=1):
            print(f"on host {number}, in a checkout with the same commit, params and inputs: {line}", flush=True)
    return distributed.launch([sys.executable, *words], size, among)


def _in_any_checkout(program: str) -> str:
    """The program as another checkout has it as well: `.venv/bin/python`; where it is elsewhere, its whole path."""
    here = Path.cwd()
    return str(Path(program).relative_to(here)) if Path(program).is_relative_to(here) else program


def _tracked(name: str, params: Params, ranks: Ranks) -> AbstractContextManager[Run]:
    """The stage's tracking run; the first rank alone keeps a journal."""
    from rlhf import tracking

    if not ranks.first:
        return nullcontext(tracking.SilentRun())
    return tracking.stage_run(name, params.model_dump(), params.tracking.mirror)


def override_place(workspace: Path, stage: str, params: Params) -> Path:
    """Where the stage writes with overrides that come to these params."""
    return workspace / "runs" / stage / sha256(params.model_dump_json().encode()).hexdigest()[:12]


@contextmanager
def _staging(place: Path, name: str) -> Iterator[Path]:
    """A fresh directory in `place`, on its file system, so that a rename into place is atomic; locked meanwhile."""
    partial = place / ".partial"
    partial.mkdir(exist_ok=True)
    staging = Path(mkdtemp(prefix=f"{name}-", dir=partial))
    try:
        with locks.exclusive(anchors.stage_lock(staging), "sweeps it"):
            yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _can_rename(staging: Path, directory: Path) -> bool:
    """Whether a rename moves files from `staging` to `directory`; tried, for device numbers hide bind mounts."""
    probe = staging / ".probe"
    probe.touch()
    try:
        probe.rename(directory / f".{staging.name}").unlink()
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        probe.unlink()
        return False
    return True


def _rename(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)


def _ignore_signals() -> None:
    """From here on Ctrl-C and SIGTERM come too late: a stage whose outputs are in place must not end as failed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
