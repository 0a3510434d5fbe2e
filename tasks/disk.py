"""How much disk the pipeline's shared places take, and whether that is within `limits.disk_gb`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rlhf import anchors
from rlhf.errors import UserError
from rlhf.params import Limits
from tasks import workspaces

GB = 1e9


def places() -> dict[str, Path]:
    """What grows from run to run, by its name; artifacts only where they are on this host."""
    main, is_here = anchors.main_checkout(), not anchors.is_remote(anchors.tracking_uri())
    found = {
        "workspaces": workspaces.directory(),
        "DVC's cache": workspaces.cache_dir(),
        "training states": anchors.state_dir(),
        "downloads": anchors.downloads_dir(),
        "journals": anchors.journal_dir(),
        "runs/": main / "runs",
    }
    return found | ({"artifacts": anchors.artifact_root()} if is_here else {})


def used() -> dict[str, int]:
    """Bytes on disk by place; a file that has several names there counts once."""
    seen: set[tuple[int, int]] = set()
    return {name: size(place, seen) for name, place in places().items()}


def size(place: Path, seen: set[tuple[int, int]] | None = None) -> int:
    """Bytes on disk below `place`, without the files in `seen`, to which it adds its own."""
    seen = set() if seen is None else seen
    total = 0
    for status in _files(place):
        if (key := (status.st_dev, status.st_ino)) not in seen:
            seen.add(key)
            total += status.st_blocks * 512
    return total


def require_room(limits: Limits) -> None:
    """Raises UserError where the budget is used up already; 0 allows everything, and then nothing is measured."""
    if limits.disk_gb and sum((taken := used()).values()) > limits.disk_gb * GB:
        raise UserError(f"limits.disk_gb={limits.disk_gb:g}: {in_words(taken)}: make gc, or raise the limit")


def in_words(taken: dict[str, int]) -> str:
    """The sum and its largest parts: "12.3 GB are taken (DVC's cache 9.0, artifacts 3.1)"."""
    parts = sorted(taken.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {amount / GB:.1f}" for name, amount in parts if amount >= GB / 20)
    return f"{sum(taken.values()) / GB:.1f} GB are taken{f' ({listed})' if listed else ''}"


def _files(place: Path) -> Iterator[os.stat_result]:
    """The status of each file below `place`, or of `place` itself; those that go meanwhile are passed over."""
    if place.is_file():
        yield place.lstat()
    for directory, _, names in os.walk(place):
        for name in names:
            try:
                yield Path(directory, name).lstat()
            except OSError:
                continue
