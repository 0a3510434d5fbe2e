"""MLflow as this project uses it: quiet, quick to give up on, named without its password.

mlflow takes seconds to import, so functions that talk to it import it.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlhf import access, anchors, locks, postgresql
from rlhf.redaction import redact

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "gsm8k-rlhf"
SILENCE = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""How long MLflow may hang on an unreachable server (its own defaults: minutes); the user's environment wins."""


def quiet_mlflow() -> ModuleType:
    """The mlflow package without its chatter, telemetry and patience, with the log-in of our own servers."""
    for name, value in (PATIENCE | postgresql.PATIENCE | SILENCE | access.for_clients()).items():
        os.environ.setdefault(name, value)
    access.past_proxies()
    import mlflow

    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs what it raises, with a traceback
    return mlflow


def client(uri: str) -> MlflowClient:
    """MLflow's client for the server or database at `uri`.

    Raises sqlite3.Error, OSError or SQLAlchemyError where a database cannot be opened, which MLflow would try for
    minutes.
    """
    mlflow = quiet_mlflow()
    database = anchors.sqlite_file(uri.partition("?")[0])
    if database is None:
        if uri.startswith("postgresql+psycopg2:"):
            postgresql.connect(uri).close()
        return mlflow.MlflowClient(uri)
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA schema_version")  # reads the file
    with locks.in_turn(database.parent / ".cache" / "tracking.lock"):  # two that make its tables at once break it
        return mlflow.MlflowClient(uri)


def experiment_id(client: MlflowClient) -> str:
    """The experiment's id; it is made if it is missing, with an absolute artifact root where no server has its own."""
    from mlflow.exceptions import MlflowException

    if experiment := client.get_experiment_by_name(EXPERIMENT):
        return experiment.experiment_id
    root = None if anchors.is_remote(anchors.tracking_uri()) else anchors.artifact_root().as_uri()
    try:
        return client.create_experiment(EXPERIMENT, root)
    except MlflowException:
        if experiment := client.get_experiment_by_name(EXPERIMENT):  # another process was faster
            return experiment.experiment_id
        raise


def search_by_outs(client: MlflowClient, stage: str, outs: Mapping[str, str]) -> str | None:
    """The id of the latest run of `stage` that made exactly `outs`."""
    wanted = {"stage": stage} | out_tags(outs)
    query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in wanted.items())
    order = ["attributes.start_time DESC"]
    runs = client.search_runs([experiment_id(client)], query, max_results=1, order_by=order)
    return runs[0].info.run_id if runs else None


def out_tags(outs: Mapping[str, str]) -> dict[str, str]:
    """The tags by which a run is found: the hash of each output of its stage (path → md5 as in `dvc.lock`)."""
    return {f"dvc.out.{path}": md5 for path, md5 in outs.items()}


def without_password(uri: str) -> str:
    """The tracking URI as it may be shown."""
    password = urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri


def reason(error: BaseException) -> str:
    """What the error at the root of `error` says, in one line: MLflow wraps a refused connection in paragraphs.

    An error that says nothing is no root: SQLAlchemy raises some to itself, called "()".
    """
    said, link = type(error).__name__, error
    while True:
        if re.search(r"\w", words := " ".join(str(link).split())):
            said = words
        if not (cause := link.__cause__ or link.__context__):
            return redact(said)[:200]
        link = cause


def is_refusal(error: Exception) -> bool:
    """Whether the server understood an entry and said no to it, so that sending it again is no use."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and error.get_http_status_code() == 400


def is_unknown_run(error: Exception) -> bool:
    """Whether the server says that there is no such run, as one does that was set up anew."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and error.error_code == "RESOURCE_DOES_NOT_EXIST"
