"""What a stage runs on: processor, GPU, memory, and the software below the code. Its MLflow run carries it as tags."""

from __future__ import annotations

import os
import platform
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from rlhf import anchors

PREFIX = "machine."
DECISIVE = ("processor", "instructions", "gpu", "libc", "python", "torch", "lock")
"""What decides, beside params, data and code, whether the same run gives the same bits."""


def tags() -> dict[str, str]:
    """The tags of a run in this process; instructions and GPU only where torch is loaded."""
    found = {
        "processor": processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "lock": sha256((anchors.CHECKOUT / "requirements.lock").read_bytes()).hexdigest(),
        **_seen_by_torch(),
    }
    return {f"{PREFIX}{key}": value for key, value in found.items() if value}


def of_tags(tags: dict[str, str]) -> dict[str, str]:
    """What the tags of a run or version tell of its machine, without the prefix."""
    return {key.removeprefix(PREFIX): value for key, value in sorted(tags.items()) if key.startswith(PREFIX)}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as Linux tells it, or what Python knows of it elsewhere."""
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes of memory that this machine has, or that the container on it may take."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    told = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(told)) if told.isdigit() else total


def _seen_by_torch() -> dict[str, str]:
    torch = sys.modules.get("torch")  # loading it takes seconds, which a stage without tensors is not to pay
    if torch is None:
        return {}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {"instructions": torch.backends.cpu.get_cpu_capability(), "gpu": gpu}
