"""``th.harvest`` and ``th.open``. They import the implementation when they are called."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from tenterhook.address import Selector
from tenterhook.errors import HarvestError

if TYPE_CHECKING:
    from tenterhook.harvest.engine_job import HarvestEngine
    from tenterhook.harvest.progress import Harvest
    from tenterhook.store.read import Store

__all__ = ["harvest", "open"]

Engine = Literal["auto", "local", "ranks", "ray"]


NO_OPTIONS = "generate= is a dict of options; got {given!r}. For a number of tokens: generate=dict(max_new_tokens=16)"

NOT_A_MODEL = (
    "th.harvest takes a model, a function that makes one, or an engine of vLLM that was attached as an LLM: "
    "engine = attach(llm); got a {kind}"
)


def harvest(  # noqa: PLR0913  # all but three have a default
    model: nn.Module | Callable[[], nn.Module] | HarvestEngine,
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
    generate: Mapping[str, Any] | None = None,
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
    """Run a model over a data set and store the values at the points as rows, in a directory or an object store.

    >>> import tempfile, torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> folder = tempfile.mkdtemp()
    >>> done = th.harvest(model, torch.randn(100, 2), "1", to=folder, batch_size=10)
    >>> th.open(folder)["1"][90:].shape
    torch.Size([10, 3])

    Repeating the same call resumes an interrupted harvest: only missing shards are made. A call with another model,
    other data or other options is an error.

    ``to`` can also be a function. It receives the rows of each batch, and nothing is stored:

    >>> rows = []
    >>> done = th.harvest(model, torch.randn(100, 2), "1", to=lambda batch: rows.append(batch["1"].sum(0)))
    >>> len(rows), done.rows
    (4, 100)

    Args:
        model: any ``nn.Module``, or a function that returns it. Each remote worker calls the function itself. Or an
            engine of :func:`tenterhook.integrations.vllm.attach`, which takes a list of prompts: texts, or lists of
            token ids.
        batches: an iterable of tensors, tuples or dicts; a ``DataLoader``; a data set; a tensor of samples; a file
            (``.npy``, ``.safetensors``, ``.parquet``, or ``.txt`` with a tokenizer).
        *points: the points to store; any selectors.
        to: a directory, a URL such as ``s3://bucket/acts``, or a store of obstore. Or a function, which is called with
            a dict of the rows of each batch, in host memory, while the model runs on.
        rows: one row for each ``"sample"``, or for each ``"token"`` that the mask selects.
        mask: the tokens to store: the name of a tensor in the batch, or a function of the batch; ``None`` for all.
        reduce: reduce the tokens of a sample to one row: ``"last"``, ``"mean"``, ``"max"``, or a function
            ``(value, mask)``.
        project: a matrix by which the rows are multiplied.
        dtype: the dtype of stored floating-point rows; by default their own.
        grad: a function ``(output, batch)`` that returns a loss. The gradients at the points are stored too.
        call: a function ``(model, batch)`` that runs the model; by default ``model(batch)``, ``model(*batch)`` for a
            tuple, ``model(**batch)`` for a dict.
        generate: options of ``model.generate``, such as ``dict(max_new_tokens=64)``, which is then called for each
            batch of prompts. There is one row for each token that the model reads, of the prompt and of the generated
            text, and the column ``step``. The model never reads the last token, so it has no row. With an engine, the
            other options are those of its sampling parameters.
        stop: end each run of the model after the last of the points.
        copy: ``"always"`` for a model that reuses the memory of its values.
        batch_size: samples per batch, if the data is not in batches already.
        tokenizer: the tokenizer for text.
        length: the maximum number of tokens for a line of text.
        shard_rows: the approximate number of rows in a shard. A shard contains whole batches.
        shard_bytes: the approximate size of a shard in bytes; 512 MiB if neither is given.
        memory: the maximum number of bytes in flight. The model waits when it is reached.
        engine: ``"local"``: this process. ``"ranks"``: every process of ``torchrun`` or ``srun`` makes the same call
            and makes its share. ``"ray"``: Ray Data. ``"auto"``: ranks if there are several, else this process.
        workers: with ray: the number of workers; by default one for each GPU if the model is on a GPU, else one for
            each CPU except one.
        address: with ray: the cluster to connect to; by default one is started on this machine.
        progress: show a progress bar on standard error; by default only if it is a terminal.
        trust: accept parts that cannot be identified, such as an open file that ``call=`` reads. A resumed harvest
            cannot detect changes in them.
        wait: if another job harvests into the same store, wait until it ends (``True``) or at most this many seconds.
            By default it is an error, which names the machine and process of that job.

    Returns:
        A :class:`Harvest` with the number of rows, the speed and the bottleneck. Its ``open()`` opens the store.

    Raises:
        HarvestError: the data or the options do not fit the model, or a part cannot be identified.
        DifferentHarvest: the store belongs to another harvest.
        StoreError: the store is damaged or in use, or the directory contains other files.
    """
    from tenterhook.harvest.engine_job import EngineJob, HarvestEngine, prompts_of, refuse_options
    from tenterhook.harvest.job import Job
    from tenterhook.harvest.rows import RowRule
    from tenterhook.harvest.runners import HarvestOptions, run

    if generate is not None and not isinstance(generate, Mapping):
        raise HarvestError(NO_OPTIONS.format(given=generate))
    taking = RowRule("token" if generate is not None and reduce is None else rows, mask, reduce, project, dtype)
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

    if isinstance(model, HarvestEngine):
        refuse_options({"grad": grad, "call": call, "tokenizer": tokenizer, "workers": workers, "address": address})
        options.engine = "local"  # It has workers of its own.
        served = EngineJob(model, points, taking, generate=generate)
        return run(lambda: served, prompts_of(batches, batch_size), options)

    if not isinstance(model, nn.Module) and not callable(model):
        raise HarvestError(NOT_A_MODEL.format(kind=type(model).__name__))

    def job() -> Job:
        made = model if isinstance(model, nn.Module) else model()
        return Job(made, points, taking, grad=grad, stop=stop, copy=copy, call=call, generate=generate)

    return run(job, batches, options)


def open(path: str | os.PathLike[str] | Any, *, check: bool = True, **options: Any) -> Store:  # noqa: A001  # public as th.open
    """Open a store of ``th.harvest`` for reading: ``store["h.6"][i:j]``, ``.sample(n)``, ``store.loader(...)``.

    Args:
        path: a directory, a URL, or a store of obstore.
        check: compare data with its checksum when it is read for the first time.
        **options: for a URL: options of obstore, such as ``endpoint=``.

    Returns:
        A :class:`Store`.

    Raises:
        StoreError: there is no store, or it is damaged.
    """
    from tenterhook.store.place import place_of
    from tenterhook.store.read import Store

    return Store(place_of(path, **options), check=check)
