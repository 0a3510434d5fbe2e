"""Parquet files of text columns: written the same byte for byte from the same rows, read with one clear error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.errors import UserError
from rlhf.files import appearing


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Writes `rows` as Parquet, atomically; the bytes depend on rows and schema alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path) as written:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), written, compression="zstd")


def read_table(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    """The rows of a Parquet file; raises UserError where it is missing, damaged or has other columns."""
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: run the stage that writes it (dvc repro)") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}: write it again") from None
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}: it needs {', '.join(schema.names)}")
    return table.select(schema.names).to_pylist()
