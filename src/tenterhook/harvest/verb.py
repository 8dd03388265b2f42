"""``th.harvest`` and ``th.open``: the doors, which load nothing before they are used."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from tenterhook.address import Selector

if TYPE_CHECKING:
    from tenterhook.harvest.progress import Harvest
    from tenterhook.store.read import Store

__all__ = ["harvest", "open"]

Engine = Literal["auto", "local", "ranks", "ray"]


def harvest(  # noqa: PLR0913  # every one of them is somebody's need, and all but three have a default
    model: nn.Module | Callable[[], nn.Module],
    batches: Any,
    *points: Selector,
    to: str | os.PathLike[str] | Callable[[dict[str, Tensor]], Any] | Any,
    rows: Literal["sample", "token"] = "sample",
    mask: str | Callable[[Any], Tensor] | None = "attention_mask",
    reduce: Literal["last", "mean", "max"] | Callable[[Tensor, Tensor | None], Tensor] | None = None,
    project: Tensor | None = None,
    dtype: torch.dtype | None = None,
    grad: Callable[[Any, Any], Tensor] | None = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
    stop: bool = True,
    copy: Literal["auto", "always"] = "auto",
    batch_size: int | None = None,
    tokenizer: Any = None,
    length: int = 512,
    shard_rows: int | None = None,
    shard_bytes: int | None = None,
    memory: int = 256 << 20,
    engine: Engine = "auto",
    workers: int | None = None,
    address: str | None = None,
    progress: bool | None = None,
    trust: bool = False,
    wait: bool | float = False,
) -> Harvest:
    """Run a model over a data set and store what passes at the points, row by row, in a directory or object store.

    >>> import tempfile, torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> folder = tempfile.mkdtemp()
    >>> done = th.harvest(model, torch.randn(100, 2), "1", to=folder, batch_size=10)
    >>> th.open(folder)["1"][90:].shape
    torch.Size([10, 3])

    The same call again goes on where the commits stop; another model, other data or other options are refused.

    >>> rows = []
    >>> done = th.harvest(model, torch.randn(100, 2), "1", to=lambda batch: rows.append(batch["1"].sum(0)))
    >>> len(rows), done.rows
    (4, 100)

    Args:
        model: any ``nn.Module``, or a function that makes it, which workers elsewhere call for themselves.
        batches: an iterable of tensors, tuples or dicts; a ``DataLoader``; a data set; a tensor of samples; a file
            (``.npy``, ``.safetensors``, ``.parquet``, or ``.txt`` with a tokenizer).
        *points: what to store; any selectors.
        to: a directory, a URL such as ``s3://bucket/acts``, or a store of obstore. Or a function, which is given a dict
            with the rows of each batch, in host memory, while the model runs on; nothing is stored then.
        rows: one row for each ``"sample"``, or for each ``"token"`` that the mask lets through.
        mask: which tokens count: a tensor of the batch by name, or a function of the batch; ``None`` for all.
        reduce: make one row of a sample's tokens, ``"last"``, ``"mean"`` or ``"max"``; or a function ``(value, mask)``.
        project: a matrix that the rows are multiplied by.
        dtype: what floating-point rows are converted to; by default they are stored as they are.
        grad: a function ``(output, batch)`` that gives a loss; the gradients at the points are stored too.
        call: how to run the model on a batch, ``(model, batch)``; by default ``model(batch)``, ``model(*batch)`` for a
            tuple, ``model(**batch)`` for a dict.
        stop: run nothing after the last of the points.
        copy: ``"always"`` for a model that uses the memory of its values again.
        batch_size: samples in a batch, where the data is not in batches already.
        tokenizer: for text.
        length: tokens of a line of text at most.
        shard_rows: rows in a shard, about: a shard is a whole number of batches.
        shard_bytes: the same in bytes; 512 MiB if neither is given.
        memory: bytes on their way at most; then the model waits.
        engine: ``"local"``: this process. ``"ranks"``: every process of ``torchrun`` or ``srun`` calls this and
            makes its share. ``"ray"``: Ray Data. ``"auto"``: ranks where there are some, else this process.
        workers: with ray: how many; by default one for each GPU if the model is on one, else for each CPU but one.
        address: with ray: a cluster to connect to; by default one is started on this machine.
        progress: a bar on standard error; by default if that is a terminal.
        trust: vouch for what cannot be identified, such as an open file that ``call=`` reads: a resumed harvest cannot
            tell it from another.
        wait: if another job harvests into the same place, wait until it has ended, or so many seconds; by default it
            is an error, which names that job's machine and process.
    """
    from tenterhook.harvest.job import Job
    from tenterhook.harvest.rows import RowRule
    from tenterhook.harvest.runners import HarvestOptions, run

    taking = RowRule(rows, mask, reduce, project, dtype)
    options = HarvestOptions(
        to=to,
        asked={"shard_rows": shard_rows, "shard_bytes": shard_bytes},
        cutting={"batch_size": batch_size, "tokenizer": tokenizer, "length": length},
        memory=memory,
        engine=engine,
        workers=workers,
        address=address,
        progress=progress,
        trust=trust,
        wait=wait,
    )

    def job() -> Job:
        made = model if isinstance(model, nn.Module) else model()
        return Job(made, points, taking, grad=grad, stop=stop, copy=copy, call=call)

    return run(job, batches, options)


def open(path: str | os.PathLike[str] | Any, *, check: bool = True, **options: Any) -> Store:  # noqa: A001  It stands for th.open.
    """Read what ``th.harvest`` stored: ``store["h.6"][i:j]``, ``.sample(n)``, ``store.loader(...)``.

    Args:
        path: a directory, a URL, or a store of obstore.
        check: compare what is read with its checksums, the first time that it is.
        **options: for a URL: what obstore is to be told, such as ``endpoint=``.
    """
    from tenterhook.store.place import place_of
    from tenterhook.store.read import Store

    return Store(place_of(path, **options), check=check)
