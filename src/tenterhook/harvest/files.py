"""Batches from files and data sets: ``.npy``, ``.safetensors``, ``.parquet``, tokenized text, ``datasets.Dataset``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from tenterhook.errors import HarvestError
from tenterhook.harvest.batch_source import BatchSource, Cut

__all__ = ["as_batch", "source_of_dataset", "source_of_file"]

READ = 16 << 20


def source_of_file(path: str | os.PathLike[str], size: int, tokenizer: Any, length: int) -> BatchSource:
    """Return the samples of a file. The suffix determines the format."""
    file = Path(path)
    if not file.is_file():
        raise HarvestError(f"there is no file {file} to read batches from.")
    known = {".npy": _from_npy, ".safetensors": _from_safetensors, ".parquet": _from_parquet}
    if file.suffix in known:
        return known[file.suffix](file, size)
    if file.suffix in {".txt", ".md", ".text"}:
        if tokenizer is None:
            raise HarvestError(f"{file} is text, and a model needs tokens: pass tokenizer=")
        return _from_text(file, size, tokenizer, length)
    endings = ", ".join([*known, ".txt"])
    raise HarvestError(f"{file} has an unknown suffix; known are {endings}. Or pass the batches.")


def _mark(file: Path) -> str:
    """Return the digest of a file's bytes."""
    state = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while part := opened.read(READ):
            state.update(part)
    return state.hexdigest()


def _from_npy(file: Path, size: int) -> Cut:
    mapped = np.load(file, mmap_mode="r", allow_pickle=False)
    return Cut(len(mapped), size, lambda a, b: torch.from_numpy(np.array(mapped[a:b])), lambda: _mark(file))


def _from_safetensors(file: Path, size: int) -> Cut:
    """Return the rows of all tensors in the file. A batch is a dict, or a tensor if the file has only one."""
    from safetensors import safe_open

    opened: Any = safe_open(file, framework="pt")
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
    counts = {name: part.get_shape()[0] for name, part in slices.items()}
    if len(set(counts.values())) != 1:
        raise HarvestError(f"the tensors of {file} do not have one row for each sample: {counts}")

    def take(start: int, stop: int) -> Any:
        batch = {name: part[start:stop] for name, part in slices.items()}
        return batch if len(batch) > 1 else next(iter(batch.values()))

    return Cut(next(iter(counts.values())), size, take, lambda: _mark(file))


def _from_parquet(file: Path, size: int) -> Cut:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ModuleNotFoundError("pyarrow is needed to read .parquet: pip install pyarrow") from error
    table = parquet.read_table(file, memory_map=True)

    def take(start: int, stop: int) -> Any:
        return as_batch(table.slice(start, stop - start).to_pydict())

    return Cut(table.num_rows, size, take, lambda: _mark(file))


def _from_text(file: Path, size: int, tokenizer: Any, length: int) -> Cut:
    """Return the lines of a text file as samples, without empty lines."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]

    def take(start: int, stop: int) -> Any:
        made = tokenizer(lines[start:stop], padding=True, truncation=True, max_length=length, return_tensors="pt")
        return dict(made)

    return Cut(len(lines), size, take, lambda: _mark(file))


def source_of_dataset(dataset: Any, size: int) -> Cut:
    """Return the numeric columns of a ``datasets.Dataset``. Ragged columns are padded and get a mask."""
    return Cut(
        len(dataset),
        size,
        lambda start, stop: as_batch(dataset[start:stop]),
        lambda: getattr(dataset, "_fingerprint", None),
    )


def as_batch(columns: dict[str, Any]) -> dict[str, Tensor]:
    """Convert columns to tensors.

    Lists of different lengths are padded with zeros, and ``attention_mask`` marks the rest.

    >>> as_batch({"input_ids": [[5, 6, 7], [8]]})["attention_mask"]
    tensor([[1, 1, 1],
            [1, 0, 0]])
    """
    batch: dict[str, Tensor] = {}
    mask = None
    for name, values in columns.items():
        if isinstance(values, Tensor | np.ndarray):
            batch[name] = torch.as_tensor(values)
        elif values and isinstance(values[0], list | tuple | np.ndarray | Tensor):
            batch[name], padded = _padded(values)
            mask = padded if padded is not None else mask
        elif values and isinstance(values[0], int | float):
            batch[name] = torch.tensor(values)
    if not batch:
        raise HarvestError(f"the columns {list(columns)} contain no numbers for a model")
    if mask is not None and "attention_mask" not in batch:
        batch["attention_mask"] = mask
    return batch


def _padded(values: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    parts = [torch.as_tensor(value) for value in values]
    lengths = torch.tensor([len(part) for part in parts])
    longest = int(lengths.max())
    if int(lengths.min()) == longest:
        return torch.stack(parts), None
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), mask
