"""Code in two processes, joined over gloo as the ranks of a run are."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from rlhf.distributed import Ranks

T = TypeVar("T")
SIZE = 2
SECONDS = 240


def in_ranks(place: Path, work: Callable[[Ranks], T]) -> list[T]:
    """What `work` returns in each of two processes, which meet in the directory `place`."""
    place.mkdir(exist_ok=True)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_run, args=(place, rank, work)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
    errors = [path.read_text() for path in sorted(place.glob("*.error"))]
    assert not errors, errors[0]
    return [torch.load(place / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


def _run(place: Path, rank: int, work: Callable[[Ranks], object]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=SIZE)
        torch.save(work(Ranks(rank, SIZE)), place / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (place / f"{rank}.error").write_text(traceback.format_exc())
        raise
