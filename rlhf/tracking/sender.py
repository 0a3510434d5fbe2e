"""The thread that brings journals to the server, so that no other thread waits for the network.

Who wants to know that something has arrived waits until it has, until the server fails anew, or for WAIT_SECONDS.
What is not delivered stays in its journal, and the next process, or `python -m rlhf.tracking flush`, sends it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from rlhf import anchors
from rlhf.errors import UserError
from rlhf.tracking.delivery import Delivery, ParentMissingError, deliver_waiting
from rlhf.tracking.journal import Journal
from rlhf.tracking.server import client, reason, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient

PERIOD_SECONDS = 2.0
MAX_PAUSE_SECONDS = 30.0
"""After a failure the thread tries again after one period, then after twice as long, up to this."""
WAIT_SECONDS = 60.0
"""How long anybody waits: a database may have to be set up first. A server that is silent fails before (`server`)."""
POLL_SECONDS = 0.05


@cache
def sender(uri: str) -> Sender:
    """This process's sender to the server at `uri`."""
    return Sender(uri)


class Sender:
    """Delivers the journals that it is given, and those that other processes have left for the same server."""

    def __init__(self, uri: str) -> None:
        self.server = without_password(uri)
        self.fault = ""
        """Why the server has not got everything; empty where it has."""
        self._uri = uri
        self._client: MlflowClient | None = None
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()  # somebody waits for the next pass
        self._journals: dict[str, Journal] = {}
        self._ended: list[Journal] = []
        self._deliveries: dict[str, Delivery] = {}
        self._run_ids: dict[str, str] = {}
        self._begun = self._failed = 0  # how many passes have begun, and the number of the last one that failed
        self._has_swept = False
        self._has_warned = False

    def add(self, journal: Journal) -> None:
        """From now on this journal is delivered, while it grows and to its end."""
        self._journals[journal.key] = journal
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
            self._thread.start()

    def run_id(self, key: str) -> str:
        """The id on the server of a run whose journal was given; empty as long as the server has not made it."""
        return self._run_ids.get(key, "")

    def settle(self, journal: Journal) -> None:
        """The journal is complete: from now on `wait_for_ended` waits for it."""
        self._ended.append(journal)

    def wait_for_ended(self) -> list[Journal]:
        """Waits until the complete journals are delivered, or it is no use; those that are not are left to others."""
        ended, self._ended = self._ended, []
        self.wait(lambda: not any(journal.exists for journal in ended))
        left = [journal for journal in ended if journal.exists]
        for journal in left:
            self._journals.pop(journal.key, None)
        self._wanted.set()
        return left

    def wait(self, is_done: Callable[[], bool]) -> bool:
        """Has everything sent at once and waits until `is_done`, or until it is no use; returns whether it is done."""
        begun, end = self._begun, time.monotonic() + WAIT_SECONDS
        while not is_done() and self._failed <= begun:  # the server may have come back during a pass that fails
            if time.monotonic() > end:
                self.fault = self.fault or "is too slow"
                break
            self._wanted.set()
            time.sleep(POLL_SECONDS)
        return is_done()

    def _run(self) -> None:
        pause = PERIOD_SECONDS
        while True:
            is_awaited = self._wanted.wait(pause)
            self._wanted.clear()
            journals = list(self._journals.values())
            for key in self._deliveries.keys() - {journal.key for journal in journals}:
                self._deliveries.pop(key).close()
            self._begun += 1
            self.fault = self._pass(journals) if journals else ""
            pause = min(2 * pause, MAX_PAUSE_SECONDS) if self.fault else PERIOD_SECONDS
            if self.fault and not is_awaited:
                self._warn()
            if self.fault:
                self._failed = self._begun

    def _pass(self, journals: list[Journal]) -> str:
        """Sends what there is; the reason where not all could be sent."""
        fault = ""
        try:
            self._client = self._client or client(self._uri)
            for journal in journals:
                fault = self._deliver(journal, self._client) or fault
            if not self._has_swept:
                deliver_waiting(anchors.journal_dir(), self._client, self.server, self._is_idle)
                self._has_swept = self._is_idle()
        except Exception as error:  # of any kind: MLflow lets those of its stores, drivers and transports through
            self._has_swept = False  # others may fail as well, and leave their journals
            return f"cannot be reached ({reason(error)})"
        if self._has_warned and not fault:
            print(f"tracking: {self.server} is back", file=sys.stderr, flush=True)
            self._has_warned = False
        return fault

    def _deliver(self, journal: Journal, server: MlflowClient) -> str:
        """Sends one of this process's own journals; the reason where that has to wait for another process."""
        try:
            if journal.key not in self._deliveries:
                self._deliveries[journal.key] = Delivery(journal, server, self.server)
            delivery = self._deliveries[journal.key]
            try:
                delivery.deliver()
            finally:
                self._run_ids[journal.key] = delivery.run_id
            is_finished = delivery.finish()
        except (ParentMissingError, UserError) as error:
            if journal.exists:
                return f"has not got {journal.key} ({error})"
            is_finished = True  # by somebody else
        if is_finished:
            self._journals.pop(journal.key, None)
        return ""

    def _is_idle(self) -> bool:
        """Whether nobody waits for this process's own journals: only then those of others are sent."""
        return not self._wanted.is_set()

    def _warn(self) -> None:
        if not self._has_warned:
            kept = f"all is kept in {anchors.journal_dir()} and sent later"
            print(f"tracking: {self.server} {self.fault}: {kept}", file=sys.stderr, flush=True)
        self._has_warned = True
