"""Export of a store to Parquet: one file for each shard, with one table row for each stored row.

The row of a point is a list of numbers. Parquet has neither bf16 nor fp8, so these become float32, which is exact. Rows
with several dimensions are flattened, and their shape is in the file's metadata.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tenterhook.store.read import Store

__all__ = ["to_parquet"]

INSTALL = 'Parquet needs pyarrow: pip install "tenterhook[parquet]"'


def to_parquet(store: Store, folder: str | os.PathLike[str]) -> list[Path]:
    """Write a store to a directory of Parquet files. Existing files are not written again.

    Args:
        store: a store, from ``th.open``.
        folder: the directory; ``pyarrow.parquet.read_table(folder)`` reads all of it.

    Returns:
        The paths of all files.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ModuleNotFoundError(INSTALL) from error
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    shapes = {_name(column): list(column.shape) for column in store.columns}
    written = []
    for commit, start in zip(store.shards, store.starts.tolist(), strict=True):
        file = target / f"{commit['shard']:08d}.parquet"
        written.append(file)
        if file.exists():
            continue
        rows = store[start : start + commit["rows"]]
        table = pa.table({name: _array(pa, values) for name, values in rows.items()})
        table = table.replace_schema_metadata({"tenterhook.shapes": json.dumps(shapes)})
        temporary = file.with_name(f".{file.name}-{os.getpid()}")
        parquet.write_table(table, temporary)
        temporary.replace(file)
    return written


def _name(column: Any) -> str:
    return f"{column.key}.grad" if column.kind == "grad" else str(column.key)


def _array(pa: Any, rows: Tensor) -> Any:
    if rows.is_floating_point() and rows.dtype not in (torch.float16, torch.float32, torch.float64):
        rows = rows.float()
    flat = pa.array(rows.reshape(-1).numpy())
    return flat if rows.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, rows[0].numel())
