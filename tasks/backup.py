"""Backs up MLflow's database and artifacts, journals and Prefect's database together, and puts a backup in their place.

    python -m tasks.backup save FILE                    make backup to=FILE
    python -m tasks.backup restore FILE [--overwrite]   make restore from=FILE [overwrite=1]

A backup is one tar file: journals, then the databases as of one moment, then the artifacts, and `manifest.json` with
the hash of each member. `docs/operations.md` says what to stop before a restore.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import signal
import sys
import tarfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf import anchors, locks, process
from rlhf.anchors import PIPELINE_LOCK
from rlhf.errors import UsageError, UserError, run_command
from rlhf.hashes import sha256_file
from rlhf.registry.server import artifact_stores, lock_all, model_names
from tasks import journals
from tasks.databases import Database, database, move_aside

MANIFEST, ARTIFACTS, JOURNALS = "manifest.json", "artifacts", "journal"
MLFLOW, PREFECT = "mlflow.dump", "prefect.dump"
SERVERS_OWN = "mlflow-artifacts:"
"""How MLflow names artifacts that its server keeps, in a directory (`--artifacts`) or in some store."""
PREFECT_VARIABLES = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")


class Manifest(BaseModel):
    """What `manifest.json` says of the rest of a backup."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1] = 1
    versions: dict[str, str]
    """Of the packages that wrote the databases."""
    kinds: dict[Literal["mlflow.dump", "prefect.dump"], str]
    """Of which kind each dump is."""
    artifacts: str
    """The directory that they belong to."""
    models: list[str]
    files: dict[str, str]
    """SHA-256 of each member."""


@dataclass(frozen=True)
class Places:
    """What a backup is of."""

    databases: dict[str, Database]
    """By the name of the dump in the backup."""
    artifacts: Path


def places(artifacts: Path | None) -> Places:
    """MLflow's database and artifacts, those of `artifacts` if given, and Prefect's database.

    Raises UserError where MLflow is behind HTTP: only who has the database can dump it.
    """
    home = Path(os.environ.get("PREFECT_HOME") or anchors.main_checkout() / ".prefect")
    given = (os.environ[name] for name in PREFECT_VARIABLES if os.environ.get(name))
    found = {MLFLOW: anchors.tracking_uri(), PREFECT: next(given, f"sqlite:///{home / 'prefect.db'}")}
    return Places({name: database(uri) for name, uri in found.items()}, artifacts or anchors.artifact_root())


def save(to: Path, of: Places) -> str:
    """Writes a backup to the new file `to`, whole or not at all; returns what it holds, in words.

    Nobody registers a version or frees disk meanwhile, and nobody moves an alias while MLflow's database is dumped.
    Journals are read before the database, so that a point is in one or in both, and artifacts after it, so that all
    that it tells of is there. Raises UserError where there is nothing to save.
    """
    if to.exists():
        raise UserError(f"{to} is there already: name a new file: make backup to=FILE")
    if of.databases[MLFLOW].is_empty():
        raise UserError(f"{of.databases[MLFLOW].place} is empty: nothing to back up: set MLFLOW_TRACKING_URI")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"{to}: a file is where its directory would be: name another place: make backup to=FILE"
        ) from None
    partial = to.with_name(f".{to.name}.partial")
    names, stores = model_names(), artifact_stores()
    try:
        with (
            TemporaryDirectory(dir=to.parent) as scratch,
            locks.in_turn(anchors.gc_lock(), "frees disk (make gc), or makes a backup"),
            lock_all("register", names),
        ):
            copies, dumps = Path(scratch, JOURNALS), {}
            with lock_all("move", names):
                journals.copy_all(copies)
                for name, kept in of.databases.items():
                    if not kept.is_empty():
                        kept.dump(Path(scratch, name))
                        dumps[name] = Path(scratch, name)
            runs, artifacts = len(journals.places(copies)), _files(of.artifacts, ARTIFACTS)
            members = _files(copies, JOURNALS) | dumps | artifacts
            with os.fdopen(os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
                _write(file, members, of, names, list(dumps))
                os.fsync(file.fileno())
        partial.replace(to)
    finally:
        partial.unlink(missing_ok=True)
    dumped = ", ".join(of.databases[name].place for name in dumps)
    elsewhere = [_not_in_it(store) for store in stores if store != SERVERS_OWN or not artifacts]
    return "\n".join([f"{to}: {dumped}, {len(artifacts)} artifacts and the journals of {runs} runs", *elsewhere])


def _not_in_it(store: str) -> str:
    if store == SERVERS_OWN:
        return "not in it: what MLflow's server keeps: name its directory, --artifacts DIR, or give its bucket versions"
    return f"not in it: artifacts in {store}: give the bucket versions"


def _files(directory: Path, folder: str) -> dict[str, Path]:
    """Every file below `directory` by its name in a backup, where it lies in `folder`."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {f"{folder}/{path.relative_to(directory).as_posix()}": path for path in files}


class _Hashing:
    """A file that is hashed as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        content = self._file.read(size)
        self.digest.update(content)
        return content


def _write(file: BinaryIO, members: dict[str, Path], of: Places, models: list[str], dumps: list[str]) -> None:
    hashes = {}
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, path in members.items():
            with path.open("rb") as content:
                hashing = _Hashing(content)
                tar.addfile(tar.gettarinfo(arcname=name, fileobj=content), hashing)
            hashes[name] = hashing.digest.hexdigest()
        manifest = Manifest.model_validate(
            {
                "versions": {package: version(package) for package in ("mlflow", "prefect")},
                "kinds": {name: of.databases[name].kind for name in dumps},
                "artifacts": str(of.artifacts),
                "models": models,
                "files": hashes,
            }
        )
        text = manifest.model_dump_json(indent=2).encode()
        info = tarfile.TarInfo(MANIFEST)
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))


def restore(source: Path, to: Places, overwrite: bool) -> str:
    """Puts the backup `source` in place of what is there, all of it or nothing; returns what it held, in words.

    Journals that are there stay beside those of the backup. Raises UserError where it is no whole backup, fits these
    places not, where something is there and `overwrite` is false, or where somebody logs.
    """
    busy = "is running a pipeline here: wait for it or stop it"
    to.artifacts.parent.mkdir(parents=True, exist_ok=True)
    with (
        locks.exclusive(anchors.CHECKOUT / PIPELINE_LOCK, busy),
        TemporaryDirectory(dir=to.artifacts.parent, prefix=".restore-") as scratch,
    ):
        new, aside = Path(scratch, "new"), Path(scratch, "old")
        aside.mkdir()
        manifest = _extract(source, new)
        _require_fit(source, manifest, to)
        used = [kept.place for kept in to.databases.values() if not kept.is_empty()]
        used += [str(to.artifacts)] if to.artifacts.is_dir() and any(to.artifacts.iterdir()) else []
        if used and not overwrite:
            raise UserError(
                f"{', '.join(used)}: not empty: back it up, and say overwrite=1 (--overwrite) to replace it"
            )
        models = manifest.models
        with lock_all("register", models), lock_all("move", models), journals.at_rest(), ExitStack() as undo:
            for name in manifest.kinds:
                to.databases[name].replace(new / name, aside, undo)
            runs = len(journals.places(new / JOURNALS))
            journals.put_back(new / JOURNALS, aside, undo)
            move_aside(to.artifacts, aside, undo)
            (new / ARTIFACTS).mkdir(exist_ok=True)
            (new / ARTIFACTS).replace(to.artifacts)
            undo.pop_all()
    put = ", ".join([*(to.databases[name].place for name in manifest.kinds), str(to.artifacts)])
    later = f": python -m rlhf.tracking flush delivers what MLflow lacks of {runs} runs" if runs else ""
    return f"{source} restored: {put}{later}"


def _extract(source: Path, place: Path) -> Manifest:
    """Unpacks a backup and returns its manifest, once every member is there with its hash."""
    try:
        with tarfile.open(source, "r:") as tar:
            if foreign := next((member.name for member in tar if not _is_ours(member)), None):
                raise UserError(f"{source}: no backup of ours (it has {foreign!r}): take another one")
            tar.extractall(place, filter="data")
        manifest = Manifest.model_validate_json((place / MANIFEST).read_bytes())
        files = {path.relative_to(place).as_posix(): path for path in place.rglob("*") if path.is_file()}
        found = {name: sha256_file(path) for name, path in files.items() if name != MANIFEST}
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, (MANIFEST, *fault["loc"])))
        raise UserError(f"{source}: no whole backup ({where}: {fault['msg']}): take another one") from None
    except (
        tarfile.TarError,
        EOFError,
        FileNotFoundError,
        FileExistsError,
        IsADirectoryError,
        NotADirectoryError,
    ) as error:
        missing = {str(source): "no such file", str(place / MANIFEST): f"{MANIFEST} is missing"}
        if not isinstance(error, IsADirectoryError) and (what := missing.get(getattr(error, "filename", ""))):
            raise UserError(f"{source}: {what}: name a file that make backup wrote") from None
        raise UserError(f"{source}: no whole backup ({type(error).__name__}): take another one") from None
    dumps = found.keys() & {MLFLOW, PREFECT}
    if found != manifest.files or dumps != manifest.kinds.keys():
        raise UserError(f"{source}: no whole backup (its files are not those of its manifest): take another one")
    return manifest


def _is_ours(member: tarfile.TarInfo) -> bool:
    """Whether a member may be one of a backup: a plain file or directory, in none but a backup's own places."""
    parts = PurePosixPath(member.name).parts
    is_placed = parts[:1] in {(ARTIFACTS,), (JOURNALS,)} or parts in {(), (MANIFEST,), (MLFLOW,), (PREFECT,)}
    return (member.isfile() or member.isdir()) and is_placed and ".." not in parts


def _require_fit(source: Path, manifest: Manifest, to: Places) -> None:
    for name, kind in manifest.kinds.items():
        if to.databases[name].kind != kind:
            raise UserError(f"{source}: its {name} is {kind}'s, and {to.databases[name].place} is none: set its URI")
    if manifest.artifacts != str(to.artifacts):  # the database names artifacts by their absolute place
        raise UserError(f"{source}: its artifacts belong to {manifest.artifacts}, not to {to.artifacts}: restore there")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="backup", description="MLflow's and Prefect's data in one file, and back.")
    parser.add_argument("--artifacts", type=Path, help="MLflow's artifact directory, where a server has its own")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("save", help="write a backup").add_argument("file", type=Path)
    back = commands.add_parser("restore", help="put a backup in place")
    back.add_argument("file", type=Path)
    back.add_argument("--overwrite", action="store_true", help="replace what is there")
    given = parser.parse_args(arguments)
    process.interrupt_on(signal.SIGTERM)

    def command() -> None:
        found = places(given.artifacts.absolute() if given.artifacts else None)
        if not given.file.name:
            raise UsageError("no file is named: make backup to=FILE, make restore from=FILE")
        file = given.file.absolute()
        print(save(file, found) if given.command == "save" else restore(file, found, given.overwrite))

    return run_command("backup", command, "interrupted: everything is as it was")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
