"""MLflow runs of the stages and of the pipeline: what they log goes to a journal, and from there to the server.

No function here waits for the network, but for those that say so.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from rlhf import anchors, faults
from rlhf.files import appearing
from rlhf.hashes import dvc_md5
from rlhf.params import MirrorKind
from rlhf.redaction import redact
from rlhf.tracking import mirrors
from rlhf.tracking.journal import Record, Writer
from rlhf.tracking.sections import flatten, params_of
from rlhf.tracking.sender import sender
from rlhf.tracking.server import out_tags

PARENT_VARIABLE = "RLHF_PARENT_RUN_KEY"
"""The environment variable in which a flow hands the key of its run to the stages."""

ON_DEMAND = ("register",)
"""Stages whose run exists only if they ask for its id: registering what is registered leaves no trace."""
RESUMABLE = ("train_ppo",)
"""Stages that say at first whose run they continue."""

MAX_VALUE, MAX_DIGEST = 6000, 36
"""MLflow's limits: characters of a param and of a data set's digest."""


class Run:
    """A run, known on every server by its `key`; what it is given to log before it is begun is logged then."""

    def __init__(
        self,
        name: str,
        tags: Mapping[str, str],
        params: Mapping[str, object],
        parent: str = "",
        mirror: MirrorKind = "none",
    ) -> None:
        """`parent` is the key of the run whose child it is; raises UsageError for a mirror whose package is missing."""
        mirrors.require(mirror)
        self.key = f"{name}-{uuid4().hex[:12]}"
        self._sender = sender(anchors.tracking_uri())
        self._writer: Writer | None = None
        self._header: Record = {
            "op": "run",
            "name": name,
            "server": self._sender.server,
            "start": _now(),
            "parent": parent,
            "tags": _redacted(tags),
        }
        self._early: list[Record] = []
        self._params = {key: redact(v) if isinstance(v, str) else v for key, v in flatten(params).items()}
        self._mirror_kind = mirror
        self._mirror: mirrors.Mirror | None = None
        self.log_params(params)

    @property
    def is_begun(self) -> bool:
        """Whether the run has a journal."""
        return self._writer is not None

    @property
    def id(self) -> str:
        """The run's id on the server, which this begins the run and waits for; empty where there is none in time."""
        self.begin()
        self._sender.wait(lambda: bool(self._sender.run_id(self.key)))
        return self._sender.run_id(self.key)

    def begin(self) -> Writer:
        """Opens the journal and has it delivered; raises OSError where the disk refuses."""
        if self._writer is None:
            self._writer = Writer(anchors.journal_dir(), self.key)
            for record in (self._header, *self._early):
                self._writer.append(record)
            self._sender.add(self._writer.journal)
            if self._mirror_kind != "none":
                names = self._header["name"], self._header["parent"]
                self._mirror = mirrors.Mirror(self._mirror_kind, self.key, *names, self._params)
                for record in self._early:
                    self._mirror.log(record)
        return self._writer

    def resume(self, place: Path) -> None:
        """Begins, as the continuation of the run whose key is in the file `place`; else leaves its own key there."""
        left = place.read_text() if place.is_file() else ""
        if re.fullmatch(r"\w+-\w+", left):
            self.key = left
        else:
            with appearing(place) as written:
                written.write_text(self.key)
        self.begin()

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Logs one point a key, at this moment; a key has one point a step, the first one."""
        numbers = {key: float(value) for key, value in values.items()}
        self._log({"op": "points", "time": _now(), "step": step or 0, "values": numbers})

    def log_params(self, values: Mapping[str, object]) -> None:
        """Logs params under dotted keys; a value longer than MLflow keeps is cut."""
        texts = {key: redact(str(value))[:MAX_VALUE] for key, value in flatten(values).items()}
        self._log({"op": "params", "values": texts})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags."""
        self._log({"op": "tags", "values": _redacted(tags)})

    def tag_outs(self, outs: Mapping[str, str]) -> None:
        """Tags the run with the hash of each output, by which other runs find it."""
        self.set_tags(out_tags(outs))

    def link_original(self, stage: str, outs: Mapping[str, str]) -> None:
        """Links the run of `stage` that made exactly `outs`, if the server knows one."""
        self._log({"op": "original", "stage": stage, "outs": dict(outs)})

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Logs a file, or a directory with its name, as it is now."""
        self._log({"op": "artifact", "path": self.begin().add_file(path), "folder": folder})

    def log_text(self, text: str, name: str) -> None:
        """Logs `text` as the artifact `name`."""
        folder, _, file = name.rpartition("/")
        self._log({"op": "artifact", "path": self.begin().add_text(redact(text), file), "folder": folder})

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], name: str) -> None:
        """Logs a table as the artifact `name` (.json), which MLflow's pages show and compare between runs."""
        self.log_text(json.dumps({"columns": columns, "data": rows}, ensure_ascii=False), name)
        self.set_tags({"mlflow.loggedArtifacts": json.dumps([{"path": name, "type": "table"}])})

    def log_dataset(self, path: Path, name: str, context: str, source: Path | None = None) -> None:
        """Links a data file as the run's input; `context` says what it is read for, the digest is its DVC md5.

        `source` is where the file is found later, if that is not `path`.
        """
        place = source or path
        place = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
        digest = dataset_digest(path)
        self._log({"op": "dataset", "name": name, "digest": digest, "source": str(place), "context": context})

    def flush(self) -> bool:
        """Waits until the server has all of it, or is of no use; whether it has."""
        journal = self.begin().journal
        return self._sender.wait(lambda: journal.is_delivered(self._sender.server))

    def end(self, status: str) -> None:
        """Ends the run with `status`: nothing can be logged any more."""
        writer = self.begin()
        writer.append({"op": "end", "time": _now(), "status": status})
        faults.reach("journal.ended")
        writer.close()
        if self._mirror:
            self._mirror.close()
        self._sender.settle(writer.journal)

    def close(self, status: str) -> None:
        """Ends the run and waits, but not for long, until the server has all that this process ended.

        Says so where it has not.
        """
        self.end(status)
        left = self._sender.wait_for_ended()
        if left:
            kept = f"{left[0].place}" if len(left) == 1 else f"{len(left)} journals in {anchors.journal_dir()}"
            later = "the next stage sends it, or python -m rlhf.tracking flush"
            line = f"{self._sender.server} {self._sender.fault}: this run is kept in {kept}: {later}"
            print(f"tracking: {line}", file=sys.stderr, flush=True)

    def _log(self, record: Record) -> None:
        if self._writer:
            self._writer.append(record)
        else:
            self._early.append(record)
        if self._mirror:
            self._mirror.log(record)


class SilentRun(Run):
    """A run that logs nothing, for a process that leaves tracking to another."""

    def __init__(self) -> None:
        super().__init__("silent", {}, {})

    def begin(self) -> Writer:
        """There is no journal."""
        raise RuntimeError("a silent run has no journal")

    def resume(self, place: Path) -> None:
        """Nothing to continue."""

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Logs nothing."""

    def log_text(self, text: str, name: str) -> None:
        """Logs nothing."""

    def log_dataset(self, path: Path, name: str, context: str, source: Path | None = None) -> None:
        """Logs nothing."""

    def _log(self, record: Record) -> None:
        pass


@contextmanager
def stage_run(stage: str, params: Mapping[str, object], mirror: MirrorKind = "none") -> Iterator[Run]:
    """The run of one stage: a child of the run in $RLHF_PARENT_RUN_KEY, if there is one, with its mirror.

    Of the nested `params` it shows those of SECTIONS. It ends as FINISHED, FAILED, or KILLED when interrupted.
    """
    parent = os.environ.get(PARENT_VARIABLE, "")
    run = Run(stage, _tags(stage, "stages"), params_of(stage, params), parent, mirror)
    if stage not in (*ON_DEMAND, *RESUMABLE):
        run.begin()
    with _ended(run, on_demand=stage in ON_DEMAND):
        yield run


@contextmanager
def pipeline_run(params: Mapping[str, object], tags: Mapping[str, str]) -> Iterator[Run]:
    """The run of a whole pipeline, whose `key` a flow gives to the stages in $RLHF_PARENT_RUN_KEY."""
    run = Run("pipeline", _tags("pipeline", "flows") | dict(tags), params)
    run.begin()
    with _ended(run, on_demand=False):
        yield run


@contextmanager
def evaluation_run(params: Mapping[str, object], tags: Mapping[str, str]) -> Iterator[Run]:
    """The run of evaluating a registered version; of the nested `params` it shows those of the stage `evaluate`."""
    name = "evaluate_registered"
    run = Run(name, _tags("registry", "rlhf") | {"stage": name} | dict(tags), params_of("evaluate", params))
    run.begin()
    with _ended(run, on_demand=False):
        yield run


def dataset_digest(path: Path) -> str:
    """By what MLflow knows a data file: its DVC md5, as far as MLflow keeps it."""
    return dvc_md5(path)[:MAX_DIGEST]


def cached_child(parent: str, stage: str, outs: Mapping[str, str]) -> None:
    """Records under the run with the key `parent` that DVC skipped or restored `stage`, with a link to who made it."""
    run = Run(stage, _tags(stage, "stages") | {"cached": "true"}, {}, parent)
    run.begin()
    if outs:
        run.link_original(stage, outs)
    run.end("FINISHED")


def git_tags() -> dict[str, str]:
    """The commit of the running code, and whether the checkout differs from it; empty without git."""
    commit = anchors.git("rev-parse", "HEAD")
    if not commit:
        return {}
    dirty = anchors.git("status", "--porcelain", "--", ".", ":!dvc.lock", ":!params.yaml") != ""
    return {"mlflow.source.git.commit": commit, "git.dirty": str(dirty).lower()}


@contextmanager
def _ended(run: Run, on_demand: bool) -> Iterator[None]:
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        raise
    except Exception as error:
        run.set_tags({"error": str(error).partition("\n")[0]})
        raise
    finally:
        if run.is_begun or not on_demand:
            run.close(status)


def _redacted(tags: Mapping[str, str]) -> dict[str, str]:
    return {key: redact(value) for key, value in tags.items()}


def _tags(name: str, package: str) -> dict[str, str]:
    source = {"mlflow.source.name": f"python -m {package}.{name}", "mlflow.source.type": "LOCAL"}
    return {"stage": name} | source | git_tags()


def _now() -> int:
    return time.time_ns() // 1_000_000
