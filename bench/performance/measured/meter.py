"""What a process that is measured tells: seconds, processor seconds, peak memory. Standard library alone, because the
peers' environment has nothing of ours.

A measured program takes one argument, its settings as JSON, and prints one JSON object as its last line.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Settings = Mapping[str, Any]
Numbers = dict[str, Any]


class Watch:
    """Seconds and processor seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Numbers:
        """Both, by the names that the results have; all threads of the process count."""
        return {"seconds": time.perf_counter() - self._wall, "cpu_seconds": time.process_time() - self._cpu}


def timed(work: Callable[[], object]) -> Numbers:
    """What one call of `work` took."""
    watch = Watch()
    work()
    return watch.read()


def peak_mb() -> float:
    """The process's largest resident size so far, in megabytes (1e6 bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def run(program: Callable[[Settings], Numbers]) -> None:
    """Runs a measured program on the settings that the command line holds."""
    numbers = program(json.loads(sys.argv[1]))
    print(json.dumps({"peak_mb": peak_mb(), **numbers}), flush=True)
