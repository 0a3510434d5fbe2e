"""What is asked of the tracking server. Every function here waits for it, and says so where it cannot be reached."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from rlhf import anchors
from rlhf.tracking import server
from rlhf.tracking.delivery import deliver_waiting
from rlhf.tracking.server import client, reason, search_by_outs, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")


def find_run_by_outs(stage: str, outs: Mapping[str, str]) -> str | None:
    """The id of the latest run of `stage` that made exactly `outs`; None where there is none or no server.

    Waits for the server, to which it first sends what other processes have left.
    """
    if not outs:
        return None

    def search(store: MlflowClient) -> str | None:
        deliver_waiting(anchors.journal_dir(), store, without_password(anchors.tracking_uri()))
        return search_by_outs(store, stage, outs)

    return _asked(search, f"the run of {stage} was not looked up")


def experiment_id() -> str | None:
    """The id of the experiment that all runs belong to; None where there is no server, for which this waits."""
    return _asked(server.experiment_id, "no run can be linked to")


def _asked(question: Callable[[MlflowClient], T | None], otherwise: str) -> T | None:
    """The server's answer; None, and a line that says what comes of it, where it cannot be reached."""
    uri = anchors.tracking_uri()
    try:
        return question(client(uri))
    except Exception as error:  # of any kind: MLflow lets those of its stores, drivers and transports through
        line = f"{without_password(uri)} cannot be reached ({reason(error)}): {otherwise}"
        print(f"tracking: {line}", file=sys.stderr, flush=True)
        return None
