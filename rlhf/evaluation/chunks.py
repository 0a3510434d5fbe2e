"""An evaluation in fixed parts, each kept on disk once it is done: one that was killed goes on behind the last of them.

The parts are the same whether it was killed or not, so that each is decoded with the same neighbours, and the results
are the same to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhf import faults
from rlhf.files import appearing

Item = TypeVar("Item")
Row = dict[str, Any]
"""A result as JSON writes it and reads it back."""

BATCHES = 2
"""Batches in a part: most rows have neighbours to the end, and few minutes are lost by a kill."""


@dataclass(frozen=True)
class Chunks:
    """Where the parts lie, and how many rows are decoded at once."""

    directory: Path
    batch_size: int

    def rows(
        self,
        name: str,
        items: Sequence[Item],
        work: Callable[[Sequence[Item]], list[Row]],
        on_kept: Callable[[int], None] | None = None,
    ) -> list[Row]:
        """What `work` finds of the items, part by part; parts that are kept under `name` are read and not done again.

        `on_kept(n)` is told how many items those had.
        """
        size = BATCHES * self.batch_size
        found: list[Row] = []
        for number, start in enumerate(range(0, len(items), size)):
            part, file = items[start : start + size], self.directory / f"{name}-{number}.json"
            if file.is_file():
                if on_kept:
                    on_kept(len(part))
                rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
            else:
                rows = work(part)
                with appearing(file) as written:
                    written.write_text(json.dumps(rows), encoding="utf-8")
                faults.reach("chunk.kept")
            found += rows
        return found
