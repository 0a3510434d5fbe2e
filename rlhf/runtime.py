"""What a process decides once: device, threads, precision, determinism; and how long work shows its progress."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rlhf.errors import UsageError
from rlhf.params import Runtime

if TYPE_CHECKING:
    import torch

PLAIN_LINE_SECONDS = 5.0
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
KEPT_BYTES = 1 << 30  # a tensor up to this size is taken from memory that was freed before


def configure(runtime: Runtime, seed: int) -> None:
    """Fixes threads, kernels and the global seed, before any tensor is made.

    With `deterministic`, torch raises where it has no reproducible kernel; cuBLAS needs its workspace fixed for that.
    """
    import torch

    torch.set_num_threads(runtime.threads)
    torch.use_deterministic_algorithms(runtime.deterministic)
    # Filling fresh memory is for finding reads of it, and took a fifth of a training step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(seed)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Lets glibc use a large tensor's memory again, instead of giving it back to the kernel and asking for new pages:
    faulting them in took a fifth of a training step. Other C libraries have no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def device(runtime: Runtime) -> torch.device:
    """The device that `runtime.device` names; raises UsageError where there is no GPU to take."""
    import torch

    if runtime.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if runtime.device == "cuda":
        raise UsageError("runtime.device=cuda: torch sees no GPU here: take runtime.device=cpu or auto")
    return torch.device("cpu")


def matmul_dtype(runtime: Runtime) -> torch.dtype:
    """The precision of matrix products that `runtime.dtype` names."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[runtime.dtype]


class Progress(Protocol):
    """The handle that `progress` yields."""

    def advance(self, n: int = 1, **numbers: float) -> None:
        """Moves on by `n` and shows the numbers that matter now."""


@contextmanager
def progress(description: str, total: int) -> Iterator[Progress]:
    """A live bar on a terminal, a plain line every few seconds elsewhere (a log, the Prefect UI)."""
    if sys.stdout.isatty():
        with _terminal(description, total) as bar:
            yield bar
    else:
        yield _Lines(description, total)


@contextmanager
def _terminal(description: str, total: int) -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Bars(*columns) as bars:
        task = bars.add_task(description, total=total, numbers="")

        class Bar:
            def advance(self, n: int = 1, **numbers: float) -> None:
                bars.advance(task, n)
                if numbers:
                    bars.update(task, numbers=_numbers(numbers))

        yield Bar()


class _Lines:
    """Progress as lines of text, at most one every `PLAIN_LINE_SECONDS` and always the last."""

    def __init__(self, description: str, total: int) -> None:
        self._description, self._total = description, total
        self._done, self._start, self._shown = 0, time.monotonic(), time.monotonic()

    def advance(self, n: int = 1, **numbers: float) -> None:
        self._done += n
        now = time.monotonic()
        if self._done < self._total and now - self._shown < PLAIN_LINE_SECONDS:
            return
        self._shown = now
        filled = round(20 * self._done / self._total) if self._total else 20
        bar = "█" * filled + "░" * (20 - filled)
        count, elapsed = f"{self._done}/{self._total}", f"{now - self._start:.0f}s"
        print(f"{self._description} {bar} {count} {elapsed} {_numbers(numbers)}".rstrip(), flush=True)


def _numbers(numbers: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.4g}" for name, value in numbers.items())
