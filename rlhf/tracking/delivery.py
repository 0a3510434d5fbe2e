"""A journal on its way to a server: in order, in batches, and nothing twice.

MLflow's database keeps a point once however often it is sent with the same time, step and value. Beyond that, a
delivery that finds its run on the server asks for the points that are there before it sends any, and leaves out the
steps that a metric has: so it does not matter where an earlier delivery was killed, or on which host it was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf import faults
from rlhf.errors import UserError
from rlhf.tracking.journal import FILES, Journal, Record, Sent, destination, is_ended, last_moment, waiting
from rlhf.tracking.server import experiment_id, is_refusal, is_unknown_run, search_by_outs

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

T = TypeVar("T")

KEY_TAG = "rlhf.key"
"""The run's key in its journal, by which it is found on any server."""
MAX_METRICS, MAX_ENTRIES = 1000, 100
"""MLflow's limits: metrics, and params or tags, in one request."""


class ParentMissingError(Exception):
    """The parent's journal is there and has not been delivered."""


class Delivery:
    """Brings one journal to one server, and holds it until `close`; `points` counts those that were sent."""

    def __init__(self, journal: Journal, client: MlflowClient, server: str) -> None:
        """`server` is the client's address without a password. Raises UserError where another process delivers."""
        self.journal = journal
        self.points = 0
        self._client = client
        self._sent = journal.sent(server)
        self._has_ended = False
        """Whether the server knows an end of the run, and the journal tells of nothing after it."""
        self._there: dict[str, set[int]] | None = {}
        """The steps that the server has of each metric asked for; None where the run is new and has nothing."""
        self._held = ExitStack()
        self._held.enter_context(journal.delivering())

    @property
    def run_id(self) -> str:
        """The run's id on the server; empty as long as it is not made."""
        return self._sent.run_id

    def close(self) -> None:
        """Lets another process deliver the journal."""
        self._held.close()

    def deliver(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Sends what the server lacks, as long as `go_on`, called after each batch, says so.

        Raises whatever MLflow raises, and ParentMissingError.
        """
        try:
            self._deliver(go_on)
        except Exception as error:
            self._there = {}  # a request that failed may have arrived
            if not is_unknown_run(error):
                raise
            self._sent = Sent(self._sent.server)  # it is another one at the same address
            self._deliver(go_on)

    def finish(self) -> bool:
        """Removes the journal, and returns True, if all is delivered and nobody writes to it.

        A run whose process was killed ends as KILLED at its last record.
        """
        if self.journal.is_written() or not self.journal.is_delivered(self._sent.server):
            return False
        if not (self._has_ended or is_ended(self.journal)):
            self._send([{"op": "end", "status": "KILLED", "time": last_moment(self.journal)}])
        return self.journal.remove(self._sent.server)

    def _deliver(self, go_on: Callable[[], bool]) -> None:
        for records, end in batches(self.journal.records(self._sent.offset)):
            self._send(records)
            faults.reach("journal.sent")
            self._sent = replace(self._sent, offset=end)
            self.journal.acknowledge(self._sent)
            faults.reach("journal.acknowledged")
            if not go_on():
                return
        while self._sent.unsent and go_on():
            self._log_artifact(*self._sent.unsent[0])
            self._sent = replace(self._sent, unsent=self._sent.unsent[1:])
            self.journal.acknowledge(self._sent)

    def _send(self, records: Sequence[Record]) -> None:
        """Sends records of one kind."""
        match records[0]["op"]:
            case "run":
                self._begin(records[0])
            case "points":
                self._send_points(records)
            case "params" | "tags" as kind:
                self._send_entries(kind, {key: text for record in records for key, text in record["values"].items()})
            case "dataset":
                self._unless_refused(records, lambda some: self._send_dataset(some[0]))
            case "artifact":
                self._send_artifact(records[0])
            case "original":
                self._link_original(records[0])
            case "end":
                self._unless_refused(records, lambda some: self._end(some[0]))

    def _begin(self, record: Record) -> None:
        """Finds the run or makes it; one that is found goes on, under the parent that it has now.

        It does not where a backup brought an old journal back, and the server knows how the run ended later.
        """
        tags = record["tags"] | {KEY_TAG: self.journal.key}
        if parent := self._parent(record["parent"]):
            tags["mlflow.parentRunId"] = parent
        if run_id := self._find(self.journal.key):
            found = self._client.get_run(run_id)
            self._sent = replace(self._sent, run_id=run_id)
            self._has_ended = (found.info.end_time or 0) >= last_moment(self.journal)
            if self._has_ended:
                return
            self._client.update_run(run_id, status="RUNNING")
            if "error" in found.data.tags:
                self._client.delete_tag(run_id, "error")
            self._send_entries("tags", tags)
            return
        run = self._client.create_run(experiment_id(self._client), record["start"], tags, record["name"])
        self._sent, self._there = replace(self._sent, run_id=run.info.run_id), None

    def _parent(self, key: str) -> str | None:
        """The id of the parent; None where there is none, and where this server was never told of it."""
        if not key:
            return None
        found = self._find(key)
        if not found and Journal(self.journal.place.with_name(key)).exists:
            raise ParentMissingError("its parent run is not there yet")
        return found

    def _find(self, key: str) -> str | None:
        """The run with that key. Where a request that went unanswered made a second one, the emptier is deleted."""
        found = self._client.search_runs([experiment_id(self._client)], f"tags.`{KEY_TAG}` = '{key}'")
        ids = [run.info.run_id for run in sorted(found, key=lambda run: -len(run.data.metrics))]
        kept = self._sent.run_id if self._sent.run_id in ids else next(iter(ids), None)
        for run_id in ids:
            if run_id != kept:
                self._client.delete_run(run_id)
        return kept

    def _send_points(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        points = [
            Metric(name, value, record["time"], record["step"])
            for record in records
            for name, value in record["values"].items()
        ]
        for some in chunks([point for point in points if not self._has(point)], MAX_METRICS):
            self._unless_refused(some, lambda metrics: self._client.log_batch(self._sent.run_id, metrics=metrics))
            self.points += len(some)

    def _has(self, point: Metric) -> bool:
        if self._there is None:
            return False
        if point.key not in self._there:
            history = self._client.get_metric_history(self._sent.run_id, point.key)
            self._there[point.key] = {there.step for there in history}
        return point.step in self._there[point.key]

    def _send_entries(self, kind: str, values: dict[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        make: type[Any] = {"params": Param, "tags": RunTag}[kind]
        for some in chunks([make(*item) for item in values.items()], MAX_ENTRIES):
            self._unless_refused(some, lambda entries: self._client.log_batch(self._sent.run_id, **{kind: entries}))

    def _send_dataset(self, record: Record) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(record["name"], record["digest"], "local", json.dumps({"uri": record["source"]}))
        inputs = [DatasetInput(dataset, [InputTag("mlflow.data.context", record["context"])])]
        self._client.log_inputs(self._sent.run_id, datasets=inputs)

    def _send_artifact(self, record: Record) -> None:
        """Uploads an artifact; where that fails it is left for the end: artifacts may have a store of their own."""
        place = (record["path"], record["folder"])
        try:
            self._log_artifact(*place)
        except Exception:  # whatever that store's client raises
            self._sent = replace(self._sent, unsent=(*self._sent.unsent, place))

    def _log_artifact(self, path: str, folder: str) -> None:
        file = str(self.journal.place / FILES / path)
        self._unless_refused([file], lambda _: self._client.log_artifact(self._sent.run_id, file, folder or None))

    def _link_original(self, record: Record) -> None:
        """Links the run that made the outputs which DVC had already."""
        if found := search_by_outs(self._client, record["stage"], record["outs"]):
            link = f"[{found}](#/experiments/{experiment_id(self._client)}/runs/{found})"
            note = f"Unchanged: made by run {link}."
            self._send_entries("tags", {"original_run_id": found, "mlflow.note.content": note})

    def _end(self, record: Record) -> None:
        self._client.set_terminated(self._sent.run_id, record["status"], record["time"])
        self._find(self.journal.key)

    def _unless_refused(self, items: Sequence[T], call: Callable[[Sequence[T]], None]) -> None:
        """Sends the items; those that the server refuses for good are left out, and said; all, of a deleted run."""
        try:
            call(items)
        except Exception as error:
            if not is_refusal(error):
                raise
            if self._client.get_run(self._sent.run_id).info.lifecycle_stage == "deleted":
                return
            if len(items) > 1:
                half = len(items) // 2
                self._unless_refused(items[:half], call)
                self._unless_refused(items[half:], call)
            else:
                what = f"{self._sent.server} refused an entry of {self.journal.key}"
                print(f"tracking: {what}: {' '.join(str(error).split())[:200]}", file=sys.stderr, flush=True)


@dataclass
class Delivered:
    """What `deliver_waiting` came to; `left` says of each journal that is still there why."""

    runs: int = 0
    points: int = 0
    left: list[str] = field(default_factory=list)


def deliver_waiting(
    directory: Path,
    client: MlflowClient,
    server: str,
    go_on: Callable[[], bool] = lambda: True,
    everything: bool = False,
) -> Delivered:
    """Delivers the journals that no process writes any more, those meant for other servers only with `everything`.

    It stops where `go_on`, called after each batch, returns False. Raises whatever MLflow raises.
    """
    done = Delivered()
    for journal in waiting(directory):
        try:
            meant_for = destination(journal)
            if meant_for != server and not everything:
                done.left.append(f"{journal.key} is meant for {meant_for}")
                continue
            delivery = Delivery(journal, client, server)
        except UserError as error:
            done.left.append(str(error))
            continue
        try:
            delivery.deliver(go_on)
            done.runs += delivery.finish()
        except (UserError, ParentMissingError) as error:
            done.left.append(f"{journal.key}: {error}")
        finally:
            delivery.close()
            done.points += delivery.points
        if not go_on():
            break
    return done


def batches(records: Iterable[tuple[Record, int]]) -> Iterator[tuple[list[Record], int]]:
    """Neighbours of one kind that go in one request, and the offset behind them."""
    batch: list[Record] = []
    size, offset = 0, 0
    for record, end in records:
        added = len(record["values"]) if record["op"] in ("points", "params", "tags") else MAX_METRICS
        limit = MAX_METRICS if record["op"] == "points" else MAX_ENTRIES
        if batch and (record["op"] != batch[0]["op"] or size + added > limit):
            yield batch, offset
            batch, size = [], 0
        batch.append(record)
        size, offset = size + added, end
    if batch:
        yield batch, offset


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in runs of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
