"""Export of a store to Zarr (version 3) with TensorStore: one array for each column.

The group is written completely or not at all.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tenterhook.errors import StoreError
from tenterhook.store.format import StoredColumn
from tenterhook.store.read import Store

__all__ = ["to_zarr"]

INSTALL = 'Zarr is written by TensorStore: pip install "tenterhook[zarr]"'
CHUNK = 16 << 20  # bytes, approximately


def to_zarr(store: Store, folder: str | os.PathLike[str]) -> Path:
    """Write a store as a Zarr group in a new directory.

    Each column is an array ``[rows, …]``. Its name is that of its files in a shard: the name of the point, with
    ``.grad`` for a gradient, and ``_`` for characters that a file name cannot have. bf16 stays bf16. Zarr has no fp8,
    so it becomes float32, which is exact.

    Args:
        store: a store, from ``th.open``.
        folder: the directory, which must not exist.

    Returns:
        The directory.

    Raises:
        StoreError: the directory exists.
        ModuleNotFoundError: tensorstore is not installed.
    """
    try:
        import tensorstore
    except ImportError as error:
        raise ModuleNotFoundError(INSTALL) from error
    target = Path(folder)
    if target.exists():
        raise StoreError(f"{target} already exists; give a new directory.")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"points": list(store.points)}}
        (temporary / "zarr.json").write_text(json.dumps(group), encoding="utf-8")
        for column in store.columns:
            _write(tensorstore, store, column, temporary)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write(tensorstore: Any, store: Store, column: StoredColumn, folder: Path) -> None:
    rows = store.grad[column.key] if column.kind == "grad" else store.rows(column.key)
    chunk = max(1, min(len(store), CHUNK // max(column.rows.nbytes, 1)))
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(folder / column.file)},
        "metadata": {
            "shape": [len(store), *column.shape],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk, *column.shape]}},
            "data_type": _kind(column.rows.dtype),
        },
    }
    array = tensorstore.open(spec, create=True).result()
    for start in range(0, len(store), chunk):  # Whole chunks, so that each is written once.
        stop = min(start + chunk, len(store))
        array[start:stop].write(_numbers(rows[start:stop], array.dtype.numpy_dtype)).result()


def _kind(dtype: torch.dtype) -> str:
    return "float32" if dtype.itemsize == 1 and dtype.is_floating_point else str(dtype).removeprefix("torch.")


def _numbers(rows: Tensor, dtype: Any) -> Any:
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.int16).numpy().view(dtype)
    return (rows.float() if rows.is_floating_point() and rows.dtype.itemsize == 1 else rows).numpy()
