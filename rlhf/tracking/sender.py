"""The thread that brings journals to the server, so that no other thread waits for the network.

Who wants to know that something has arrived waits, but not for long: a server that is away says so at once, and one
that does not answer is given a few seconds. What is not delivered stays in its journal, and the next process, or
`python -m rlhf.tracking flush`, sends it.
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
from rlhf.tracking.server import client, is_remote, reason, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient

PERIOD_SECONDS = 2.0
MAX_PAUSE_SECONDS = 30.0
"""After a failure the thread tries again after one period, then after twice as long, up to this."""
SILENCE_SECONDS = 5.0
"""How long a server may leave a request unanswered before nobody waits for it any more."""
DATABASE_SILENCE_SECONDS = 60.0
"""The same for a database that MLflow opens itself, which it first has to set up."""
WAIT_SECONDS = 60.0
"""How long anybody waits for a server that answers slowly."""


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
        self._changed = threading.Condition()
        self._journals: dict[str, Journal] = {}
        self._ended: dict[str, Journal] = {}
        self._deliveries: dict[str, Delivery] = {}
        self._run_ids: dict[str, str] = {}
        self._is_running = False
        self._is_loading = False
        self._asked = self._begun = self._answered = 0
        """How often somebody wanted everything to be sent, and which of these the current and the last pass served."""
        self._heard = 0.0  # when a request was answered, monotonic
        self._is_silent = False
        self._has_swept = False
        self._has_warned = False

    def add(self, journal: Journal) -> None:
        """From now on this journal is delivered, while it grows and to its end."""
        with self._changed:
            self._journals[journal.key] = journal
            self._asked += 1
            self._changed.notify_all()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="tracking", daemon=True).start()

    def run_id(self, key: str) -> str:
        """The id on the server of a run whose journal was given; empty as long as the server has not made it."""
        return self._run_ids.get(key, "")

    def settle(self, journal: Journal) -> None:
        """The journal is complete: from now on `wait_for_ended` waits for it."""
        with self._changed:
            self._ended[journal.key] = journal

    def wait_for_ended(self) -> list[Journal]:
        """Waits until the complete journals are delivered, or it is no use; those that are not are left to others."""
        self.wait(lambda: not any(journal.exists for journal in self._ended.values()))
        with self._changed:
            left = [journal for journal in self._ended.values() if journal.exists]
            for key in self._ended:
                self._journals.pop(key, None)
            self._ended.clear()
        return left

    def wait(self, is_done: Callable[[], bool]) -> bool:
        """Has everything sent at once and waits until `is_done`, or until it is no use; returns whether it is done."""
        silence = SILENCE_SECONDS if is_remote(self._uri) else DATABASE_SILENCE_SECONDS
        start = time.monotonic()
        with self._changed:
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
            if self._is_silent:
                silence /= SILENCE_SECONDS
            while not is_done() and self._answered < asked and self._is_running:
                now = time.monotonic()
                if self._is_loading:
                    self._heard = now
                elif now > max(start, self._heard) + silence or now > start + WAIT_SECONDS:
                    self._is_silent = True
                    self.fault = self.fault or "does not answer"
                    break
                self._changed.wait(0.1)
        return is_done()

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._answered, timeout=pause)
                self._begun, journals = self._asked, list(self._journals.values())
                is_awaited = self._begun > self._answered
                for key in self._deliveries.keys() - self._journals.keys():
                    self._deliveries.pop(key).close()
                if not journals:
                    self._answered, self._is_running = self._begun, False
                    self._changed.notify_all()
                    return
            fault = self._pass(journals)
            with self._changed:
                self._answered, self.fault = self._begun, fault
                pause = min(2 * max(pause, PERIOD_SECONDS / 2), MAX_PAUSE_SECONDS) if fault else PERIOD_SECONDS
                self._changed.notify_all()
            if fault and not is_awaited:
                self._warn(fault)

    def _pass(self, journals: list[Journal]) -> str:
        """Sends what there is; the reason where not all could be sent."""
        fault = ""
        try:
            server = self._connect()
            for journal in journals:
                fault = self._deliver(journal, server) or fault
            if not self._has_swept:
                deliver_waiting(anchors.journal_dir(), server, self.server, self._on_answer_to_sweep)
                self._has_swept = not self._is_asked()
        except Exception as error:  # of any kind: MLflow lets those of its stores, drivers and transports through
            self._has_swept = False  # others may fail as well, and leave their journals
            return f"cannot be reached ({reason(error)})"
        if self._has_warned and not fault:
            print(f"tracking: {self.server} is back", file=sys.stderr, flush=True)
            self._has_warned = False
        return fault

    def _connect(self) -> MlflowClient:
        if self._client is None:
            self._is_loading = True
            try:
                self._client = client(self._uri)
            finally:
                self._is_loading = False
        return self._client

    def _deliver(self, journal: Journal, server: MlflowClient) -> str:
        """Sends one of this process's own journals; the reason where that has to wait for another process."""
        try:
            if journal.key not in self._deliveries:
                self._deliveries[journal.key] = Delivery(journal, server, self.server)
            delivery = self._deliveries[journal.key]
            delivery.deliver(lambda: self._on_delivery(delivery))
        except (ParentMissingError, UserError) as error:
            if journal.exists:
                return f"has not got {journal.key} ({error})"
            finished = True  # by somebody else
        else:
            finished = delivery.finish()
        if finished:
            with self._changed:
                self._journals.pop(journal.key, None)
        return ""

    def _on_delivery(self, delivery: Delivery) -> bool:
        self._run_ids[delivery.journal.key] = delivery.run_id
        return self._on_answer()

    def _on_answer_to_sweep(self) -> bool:
        """Others wait if somebody waits for this process's own."""
        return self._on_answer() and not self._is_asked()

    def _is_asked(self) -> bool:
        """Whether somebody has begun to wait since this pass began."""
        return self._asked > self._begun

    def _on_answer(self) -> bool:
        self._heard, self._is_silent = time.monotonic(), False
        return True

    def _warn(self, fault: str) -> None:
        if not self._has_warned:
            kept = f"all is kept in {anchors.journal_dir()} and sent later"
            print(f"tracking: {self.server} {fault}: {kept}", file=sys.stderr, flush=True)
        self._has_warned = True
