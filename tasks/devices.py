"""Which devices a stage computes on, and the lock files by which the stages of all workspaces take turns on them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from pathlib import Path

from rlhf import anchors, hosts
from rlhf.params import Params


def lock_files(declared: Collection[str], params: Params) -> list[Path]:
    """The lock files of the devices that a stage with the `declared` params of dvc.yaml computes on, made if need be.

    None for a stage that declares no `runtime`; one for each of this host's processes on a GPU of its own. The files
    lie in the main checkout, so that its worktrees share them, and nobody removes them: two processes might hold two
    files of a name.
    """
    if "runtime" not in declared:
        return []
    processes = 1
    if "distributed" in declared:
        processes = hosts.from_environment().processes_here(params.distributed.processes)
    directory = anchors.main_checkout() / ".cache" / "devices"
    directory.mkdir(parents=True, exist_ok=True)
    return [directory / f"{name}.lock" for name in devices(params.runtime.device, processes)]


def devices(device: str, processes: int) -> list[str]:
    """The names of the devices that `runtime.device` means to so many processes: `cpu`, `cuda-0`, `cuda-1`."""
    if device == "cpu" or (device == "auto" and not _gpu_is_here()):
        return ["cpu"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # torch counts among these alone
    numbers = visible.split(",") if visible else [str(number) for number in range(processes)]
    return [f"cuda-{number.strip()}" for number in numbers[:processes]]


def _gpu_is_here() -> bool:
    """Whether CUDA's driver finds a GPU, asked without loading torch."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
