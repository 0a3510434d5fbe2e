"""The MLflow server as the stages see it: quick to give up on, named without its password, and never fatal.

mlflow takes seconds to import, so functions that talk to it import it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlhf import anchors

if TYPE_CHECKING:
    from mlflow import MlflowClient

PAUSE_SECONDS = 60.0
"""How long a server that failed is left alone."""
SILENCE = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""How long MLflow may hang on an unreachable server (its own defaults: minutes); the user's environment wins."""


def quiet_mlflow() -> ModuleType:
    """The mlflow package without its chatter, telemetry and patience."""
    for name, value in (PATIENCE | SILENCE).items():
        os.environ.setdefault(name, value)
    import mlflow

    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return mlflow


def client(uri: str) -> MlflowClient:
    """MLflow's client for the server or database at `uri`.

    Raises sqlite3.Error or OSError where a sqlite database cannot be opened, which MLflow would try for 100 seconds.
    """
    if database := anchors.sqlite_file(uri.partition("?")[0]):
        database.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA schema_version")  # reads the file
    return quiet_mlflow().MlflowClient(uri)


def without_password(uri: str) -> str:
    """The tracking URI as it may be shown."""
    password = urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri


def reason(error: BaseException) -> str:
    """What the error at the root of `error` says, in one line: MLflow wraps a refused connection in paragraphs."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return " ".join(str(error).split())[:200] or type(error).__name__


@cache
def server(uri: str) -> Server:
    """This process's view of the server at `uri`: one warning and one pause for all of its runs."""
    return Server(uri)


class Server:
    """A tracking server: whatever goes wrong with it is a warning, once, and then a pause before the next try."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._client: MlflowClient | None = None
        self._retry_at = 0.0
        self._warned = False

    def attempt(self, call: Callable[[MlflowClient], None], urgent: bool = False) -> bool:
        """Runs `call` and returns whether it is over: done, or refused for good; `urgent` does not wait for a pause."""
        if time.monotonic() < self._retry_at and not urgent:
            return False
        try:
            self._client = self._client or client(self._uri)
            call(self._client)
        except Exception as error:  # of any kind: MLflow lets those of its stores, drivers and transports through
            refused = _is_refusal(error)
            self._warn("refused an entry" if refused else "cannot be reached", error)
            self._retry_at = self._retry_at if refused else time.monotonic() + PAUSE_SECONDS
            return refused
        self._retry_at = 0.0
        return True

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            place = without_password(self._uri)
            line = f"tracking: {place} {what} ({reason(error)}): going on, the record of this run may stay incomplete"
            print(line, file=sys.stderr, flush=True)
        self._warned = True


class NoServer(Server):
    """In place of a server, where nothing is to be sent."""

    def attempt(self, *_: object, **__: object) -> bool:
        """Refuses everything for good."""
        return True


def _is_refusal(error: Exception) -> bool:
    """Whether the server understood and said no, so that trying again is no use."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and 400 <= error.get_http_status_code() < 500
