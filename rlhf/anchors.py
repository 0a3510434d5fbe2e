"""The absolute places that every workspace shares: they default to the main checkout, whatever worktree asks."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from rlhf.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[1]
"""The checkout that this code runs from, which may be a worktree."""
UNCOMMITTED = Path(".cache/uncommitted.patch")
"""In a workspace that was made with uncommitted changes: these, on top of its commit."""
TRACKING_SCHEMES = (
    "http",
    "https",
    "sqlite",
    "postgresql",
    "mysql",
    "mssql",
    "file",
    "databricks",
    "databricks-uc",
    "uc",
)
"""What MLflow 3 opens; a database's driver may follow its name behind a plus."""
PIPELINE_LOCK = Path(".cache/pipeline.lock")
"""Held in its checkout by the pipeline that runs there; beside nothing that `make clean` or `make gc` removes."""


@cache
def main_checkout(checkout: Path = CHECKOUT) -> Path:
    """The main checkout of the repository whose worktree (or main checkout) `checkout` is.

    `checkout` itself where there is no git, or where it is only a directory inside somebody else's repository.
    """
    answer = git("rev-parse", "--path-format=absolute", "--show-toplevel", "--git-common-dir", directory=checkout)
    toplevel, _, common = (answer or "").partition("\n")
    is_repository = bool(common) and Path(toplevel).resolve() == checkout.resolve()
    # A submodule's or a bare repository's directory is not called .git, and its parent is no checkout.
    if is_repository and Path(common).name == ".git":
        return Path(common).parent.resolve()
    return checkout


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, or the sqlite database in the main checkout.

    A relative sqlite path is made absolute, and PostgreSQL's driver is named. Raises UserError for what is no URI, and
    for a sqlite database in a directory that is not there: a misspelt one would begin a history of its own.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{main_checkout() / 'mlflow.db'}"
    database = sqlite_file(uri)
    if database is None:
        _require_uri(uri)
    elif not database.parent.is_dir():
        raise UserError(f"MLFLOW_TRACKING_URI={uri}: {database.parent} is no directory: make it, or correct the URI")
    return f"sqlite:///{database}" if database else with_driver(uri)


def _require_uri(uri: str) -> None:
    try:
        scheme = urlsplit(uri).scheme
    except ValueError as error:
        remedy = "write http://host:port or postgresql://..., with %5B for a bracket in a password"
        raise UserError(f"MLFLOW_TRACKING_URI={uri}: {error}: {remedy}") from None
    if "://" in uri and scheme.partition("+")[0] not in TRACKING_SCHEMES:
        remedy = "write http://host:port, postgresql://... or sqlite:///FILE"
        raise UserError(f"MLFLOW_TRACKING_URI={uri}: MLflow keeps nothing under {scheme}://: {remedy}")


def artifact_root() -> Path:
    """Where artifacts go if no tracking server keeps them: beside the sqlite database."""
    database = sqlite_file(tracking_uri())
    return (database.parent if database else main_checkout()) / "mlartifacts"


def registry_lock() -> Path:
    """The file whose lock a process holds while it registers a model."""
    return artifact_root().parent / ".cache" / "registry.lock"


def gc_lock() -> Path:
    """The file whose lock `make gc` holds while it removes files, and who copies them meanwhile."""
    return main_checkout() / ".cache" / "gc.lock"


def state_dir() -> Path:
    """Where training state lives between a kill and the next run: RLHF_STATE_DIR, or in the main checkout."""
    return _directory("RLHF_STATE_DIR", ".state")


def state_lock(state: Path) -> Path:
    """The file whose lock a stage holds while it trains on the state in the directory `state`."""
    return state / "lock"


def stage_lock(staging: Path) -> Path:
    """The file whose lock a stage holds while it writes to its directory in .partial/."""
    return staging / ".lock"


def journal_dir() -> Path:
    """Where what runs log lies until a tracking server has it: RLHF_JOURNAL_DIR, or in the main checkout."""
    return _directory("RLHF_JOURNAL_DIR", ".journal")


def mirror_dir() -> Path:
    """Where mirrors of the metrics lie: RLHF_MIRROR_DIR, or in the main checkout."""
    return _directory("RLHF_MIRROR_DIR", ".mirror")


def _directory(variable: str, name: str) -> Path:
    """The place that a variable names, or `name` in the main checkout; raises UserError where a file is there."""
    place = Path(os.environ.get(variable) or main_checkout() / name).absolute()
    if place.is_file():
        raise UserError(f"{place}: a file, and {variable} wants a directory: name another place, or remove it")
    return place


def downloads_dir() -> Path:
    """Where fetched checkpoints lie for every workspace: RLHF_DOWNLOADS_DIR, or in the main checkout."""
    return _directory("RLHF_DOWNLOADS_DIR", ".cache/downloads")


def environment() -> dict[str, str]:
    """What a child process in any workspace needs to use the same places."""
    return {
        "MLFLOW_TRACKING_URI": tracking_uri(),
        "RLHF_STATE_DIR": str(state_dir()),
        "RLHF_JOURNAL_DIR": str(journal_dir()),
        "RLHF_MIRROR_DIR": str(mirror_dir()),
        "RLHF_DOWNLOADS_DIR": str(downloads_dir()),
        "DO_NOT_TRACK": "true",
    }


def sqlite_file(uri: str) -> Path | None:
    """The database file of a sqlite URI; None for any other, and for a database in memory."""
    prefix, separator, place = uri.partition("sqlite:///")
    return Path(place).absolute() if separator and not prefix and not place.startswith(":") else None


def is_remote(uri: str) -> bool:
    """Whether `uri` is a server's rather than a database's."""
    return uri.lower().startswith(("http://", "https://"))


def with_driver(uri: str) -> str:
    """A `postgresql://` URI with the driver that we install: SQLAlchemy's own choice varies by version."""
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}+psycopg2://{rest}" if separator and scheme == "postgresql" else uri


def git(*arguments: str, directory: Path = CHECKOUT) -> str | None:
    """Standard output of a git command in `directory`, stripped; None where git is missing or refuses."""
    command = ["git", "-C", str(directory), *arguments]
    try:
        return subprocess.run(command, env=git_environment(), capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def git_environment() -> dict[str, str]:
    """This process's environment without variables such as GIT_DIR, for a git hook's would name another repository.

    git then runs no hook either: that of `dvc install`, for one, would check data out into each new worktree.
    """
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return ours | {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.hooksPath", "GIT_CONFIG_VALUE_0": os.devnull}
