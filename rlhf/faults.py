"""Named points at which a test kills the process, to prove that what was begun there is safe.

    RLHF_KILL_AT=state.synced      SIGKILL at the first visit of the point
    RLHF_KILL_AT=publish.aside:2   SIGKILL at the second

Without the variable a point costs one look into the environment; none lies in a loop that counts.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

KILL_VARIABLE = "RLHF_KILL_AT"
POINTS = (
    "best.kept",  # in memory, the state on disk has the former best policy
    "state.begun",
    "state.written",  # beside the old state, perhaps only in the system's buffers
    "state.synced",
    "state.renamed",  # over the old state, the directory perhaps only in the system's buffers
    "state.safe",
    "chunk.kept",  # a part of an evaluation is on disk, the next one not begun
    "publish.begun",
    "publish.aside",  # an output of an earlier run is away, the new one not there
    "publish.renamed",
    "publish.ended",  # all outputs are in place, the training state is still there
    "publish.discarded",
    "journal.begun",  # open, its first record is not there
    "journal.appended",
    "journal.sent",  # a batch is on the server, the journal does not say so
    "journal.acknowledged",
    "journal.ended",  # the last record is there, perhaps not yet on the server
    "journal.removed",  # delivered, the records are gone and the rest of the directory is not
)

_visits: Counter[str] = Counter()


def reach(point: str) -> None:
    """Ends the process by SIGKILL where the environment asks for this visit of `point`."""
    wanted = os.environ.get(KILL_VARIABLE)
    if wanted is None:
        return
    name, _, visit = wanted.partition(":")
    _visits[point] += 1
    if point == name and _visits[point] == int(visit or 1):
        os.kill(os.getpid(), signal.SIGKILL)
