"""Code in several processes, joined over gloo as the ranks of a run are."""

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
SECONDS = 240


def in_ranks(place: Path, work: Callable[[Ranks], T], size: int = 2) -> list[T]:
    """What `work` returns in each of `size` processes, which meet in the directory `place`."""
    place.mkdir(exist_ok=True)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_run, args=(place, Ranks(rank, size), work)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
    errors = [path.read_text() for path in sorted(place.glob("*.error"))]
    assert not errors, errors[0]
    return [torch.load(place / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _run(place: Path, ranks: Ranks, work: Callable[[Ranks], object]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=ranks.rank, world_size=ranks.size)
        torch.save(work(ranks), place / f"{ranks.rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (place / f"{ranks.rank}.error").write_text(traceback.format_exc())
        raise
