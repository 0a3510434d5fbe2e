"""A lock between processes, which the kernel frees however its holder ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.errors import UserError


@contextmanager
def exclusive(path: Path, busy: str) -> Iterator[None]:
    """Holds the lock file `path`, which then says this process's id; it and its directory are made if need be.

    Raises UserError "process N `busy`" where another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"process {file.read().strip()} {busy}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
