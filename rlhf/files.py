"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Where to write what `path` is to hold: at the end it is on the disk and has the name.

    What fails meanwhile leaves `path` as it was and nothing beside it. Raises OSError as writing does.
    """
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield written
        sync(written)
        written.replace(path)
    finally:
        with suppress(OSError):  # a read-only disk refuses even to remove what is not there
            written.unlink()


def sync(path: Path) -> None:
    """Has the system write what it still holds of a file, or of a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
