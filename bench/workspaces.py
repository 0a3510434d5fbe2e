"""Workspaces of measurements: each made once from the code as it is then, so that an edit meanwhile changes no run.

They lie below .cache/NAME, under a key of the code. What is done stays done: a measurement goes on where it was
stopped.
"""

from __future__ import annotations

import csv
import io
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf import anchors, config, locks, process
from rlhf.errors import UserError
from rlhf.files import appearing
from rlhf.stage import override_place
from tasks.processes import supervised

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CODE = ("rlhf", "stages", "conf", "requirements.lock")
"""What every run is made of; a measurement that runs code of its own names it beside this."""
RESULTS = anchors.CHECKOUT / "bench" / "results"


@contextmanager
def measuring(name: str, code: Sequence[str] = CODE) -> Iterator[Path]:
    """The directory of the measurement `name` for the code as it is; nobody else measures there meanwhile."""
    process.interrupt_on(signal.SIGTERM)
    root = anchors.CHECKOUT / ".cache" / name / code_key(anchors.CHECKOUT, code)
    with locks.exclusive(root / "lock", "measures here: wait for it or stop it"):
        yield root


def code_key(checkout: Path, code: Sequence[str] = CODE) -> str:
    """A key of all that decides a result beside params: results of other code are never taken for this code's."""
    digest = sha256()
    for name in code:
        place = checkout / name
        for file in sorted([place] if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.yaml")]):
            digest.update(f"{file.relative_to(checkout)}\0".encode() + sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def prepare(root: Path, name: str, words: Sequence[str], stages: Sequence[str], code: Sequence[str] = CODE) -> Path:
    """The workspace `name` with the params that `words` compose, in which `stages` have run; the code is linked."""
    copied, workspace = _copy_code(root, code), root / name
    for part in code:
        link = workspace / part
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(copied / part)
    config.write(config.compose(words), workspace / config.PARAMS_FILE)
    for stage in stages:
        done = workspace / f"{stage}.done"
        if not done.is_file():
            run(workspace, f"stages.{stage}", [])
            done.touch()
    return workspace


def run(workspace: Path, module: str, arguments: Sequence[str]) -> None:
    """Runs a module in the workspace, its output in a file; raises UserError that names the file where it fails."""
    log = workspace / f"{module.rpartition('.')[2]}.log"
    environ = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{workspace / 'mlflow.db'}",
        "RLHF_STATE_DIR": str(workspace / "state"),
        "RLHF_JOURNAL_DIR": str(workspace / "journal"),
        # Threads that spin while they wait made runs beside others ten times as slow; results are the same.
        "OMP_WAIT_POLICY": "passive",
    }
    command = ["python", "-m", module, *arguments]
    with log.open("w") as output, supervised(command, directory=workspace, environ=environ, output=output) as process:
        code = process.wait()
    if code:
        raise UserError(f"{' '.join(command[1:])} failed with {code}: see {log}")


def output(workspace: Path, stage: str, overrides: Sequence[str], name: str) -> Path:
    """Where the stage, run with overrides, puts its output `name`."""
    params = config.load(overrides, workspace / config.PARAMS_FILE)
    return override_place(workspace, stage, params) / name


def with_marked(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of the measurement `name`; raises UserError where it has none."""
    begin, end = f"<!-- {name}: written by python -m bench.{name} -->", f"<!-- {name}: end -->"
    head, opening, rest = page.partition(begin)
    _, closing, tail = rest.partition(end)
    if not opening or not closing:
        raise UserError(f"the page of {name}: the marks of its table are missing: put {begin} and {end} back")
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Writes the rows, the head first, whole or not at all."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(path, text.getvalue())


def write_picture(path: Path, figure: Figure) -> None:
    """Writes the figure as PNG, whole or not at all; the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path) as written:
        figure.savefig(written, format="png", dpi=120, metadata={"Software": None})


def write_text(path: Path, text: str) -> None:
    """Writes the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path) as written:
        written.write_text(text)


def _copy_code(root: Path, code: Sequence[str]) -> Path:
    """The code as it is now, or as it was when `root` was made: the directory appears whole."""
    copied, written = root / "code", root / ".code.new"
    if not copied.is_dir():
        shutil.rmtree(written, ignore_errors=True)
        for name in code:
            source, target = anchors.CHECKOUT / name, written / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, target)
        written.replace(copied)
    return copied
