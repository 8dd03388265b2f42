"""The subcommands that write and check stores: ``harvest`` and ``verify``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from torch import Tensor

from tenterhook.cli.errors import DIFFERENT, CommandError, missing_package, speaking
from tenterhook.cli.models import FORMS, python_object, tokenizer_of
from tenterhook.cli.options import DTYPES, AskedPoints, model_alone, print_json, print_table, size_of
from tenterhook.cli.run import LOSSES, Loss, calling, loss_of
from tenterhook.harvest.verb import harvest as harvest_of

if TYPE_CHECKING:
    from tenterhook.harvest.progress import Harvest
    from tenterhook.harvest.verify import Report

__all__ = ["harvest", "verify"]

DATA = """DATA is one of
  file.npy .safetensors .parquet
  file.txt                one sample per line, tokenized with the model's tokenizer or --tokenizer DIR
  package.module:name     batches, a DataLoader, a data set or a tensor of samples, or a function that returns one
  path/to/file.py:name    the same, in a file"""
LEAST = 10**5  # bytes; the smallest write buffer


@click.command(
    epilog="""\b
Examples:
  tenterhook harvest mymodels.py:Net 'layer4.*' --data images.npy --batch-size 64 -o acts
  tenterhook harvest ./gpt2 transformer.h.6 --data corpus.txt --rows token --rows-dtype bfloat16 -o acts
  tenterhook harvest mymodels.py:Net layer4 --data mydata.py:loader -o s3://bucket/acts
  torchrun --nproc-per-node 8 -m tenterhook harvest ./gpt2 transformer.h.6 --data corpus.npy --rows token -o acts
\b
"""
    + FORMS
    + "\n\n\b\n"
    + DATA
)
@model_alone
@click.argument("selectors", nargs=-1, required=True)
@click.option("--data", required=True, metavar="DATA", help="The data to run the model on, see below.")
@click.option("--output", "-o", "to", required=True, metavar="PLACE", help="A directory, or a URL: s3://bucket/acts.")
@click.option(
    "--rows",
    type=click.Choice(["sample", "token"]),
    default="sample",
    show_default=True,
    help="Store a row per sample or per token.",
)
@click.option("--reduce", type=click.Choice(["last", "mean", "max"]), help="Reduce the tokens of a sample to one row.")
@click.option("--rows-dtype", type=click.Choice(list(DTYPES)), help="Convert floating-point rows to this dtype.")
@click.option("--grad", is_flag=True, help="Also run backward, and store gradients.")
@click.option(
    "--loss", type=click.Choice(["auto", *LOSSES]), default="auto", show_default=True, help="As in tenterhook record."
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples in a batch [32].")
@click.option(
    "--length", type=click.IntRange(min=1), default=512, show_default=True, help="Largest number of tokens in a text."
)
@click.option("--shard-rows", type=click.IntRange(min=1), help="Approximate number of rows in a shard.")
@click.option("--shard-size", help="Approximate size of a shard [512 MiB].")
@click.option("--memory", default="256MB", show_default=True, help="Largest number of bytes that wait to be written.")
@click.option("--engine", type=click.Choice(["auto", "local", "ranks", "ray"]), default="auto", show_default=True)
@click.option("--workers", type=click.IntRange(min=1), help="With ray: the number of workers.")
@click.option("--address", help="With ray: the address of the cluster.")
@click.option("--trust", is_flag=True, help="Accept what cannot be identified; the error names it.")
@click.option("--wait", is_flag=True, help="Wait for another job that harvests into the same place.")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def harvest(  # noqa: PLR0913  # each is an option
    asked: AskedPoints,
    selectors: tuple[str, ...],
    data: str,
    to: str,
    rows_dtype: str | None,
    loss: Loss,
    shard_size: str | None,
    memory: str,
    *,
    grad: bool,
    json_: bool,
    **options: Any,
) -> None:
    """Run MODEL on a whole data set, and store the values at SELECTORS as rows.

    The same command continues an interrupted harvest. A different model, data set or option is an error.
    """
    _check(to, shard_size, options)
    batches = _data(data)
    tokenizer = _tokenizer(asked, data)
    nbytes = size_of(memory)
    if nbytes < LEAST:
        raise CommandError(f"--memory is {LEAST} bytes or more; got {memory}")
    with calling(asked.model), speaking():  # `calling` handles what `speaking` lets through: model errors.
        done = harvest_of(
            asked.again if options["engine"] == "ray" else asked.model,
            batches,
            *selectors,
            to=to,
            dtype=DTYPES[rows_dtype] if rows_dtype else None,
            grad=_Loss(loss) if grad else None,
            tokenizer=tokenizer,
            shard_bytes=size_of(shard_size) if shard_size else None,
            memory=nbytes,
            **options,
        )
    if json_:
        print_json(_described(done))
    else:
        print_table(done.table())


def _check(to: str, shard_size: str | None, options: dict[str, Any]) -> None:
    if shard_size is not None and options["shard_rows"] is not None:
        raise CommandError("give --shard-rows or --shard-size, not both.")
    if options["engine"] == "ray" and importlib.util.find_spec("ray") is None:
        raise missing_package("ray", "ray")
    _check_store(to)


def _check_store(place: str) -> None:
    if "://" in place and importlib.util.find_spec("obstore") is None:
        raise missing_package("obstore", "store")


def _data(text: str) -> Any:
    """Return the path of a data file, which ``th.harvest`` reads, or the Python object that the text names."""
    if Path(text).is_file() or (":" not in text and Path(text).suffix):
        return text
    return python_object(text, lambda text: f"{text!r} is not a data set.\n{DATA}")


def _tokenizer(asked: AskedPoints, data: str) -> Any:
    if Path(data).suffix not in {".txt", ".md", ".text"}:
        return None
    if asked.folder is None:
        raise CommandError(
            f"{data} is text, which needs a tokenizer: use a model directory that has one, or --tokenizer DIR."
        )
    return tokenizer_of(asked.folder)


class _Loss:
    """The function from the model's output to the loss.

    Its ``__qualname__`` is written to the manifest, so that a harvest cannot be resumed with a different loss.
    """

    def __init__(self, how: Loss) -> None:
        self.how = how
        self.__qualname__ = f"loss_of.{how}"

    def __call__(self, output: Any, _: Any) -> Tensor:
        return loss_of(output, self.how)


def _described(done: Harvest) -> dict[str, Any]:
    names = ("rows", "made", "found", "seconds", "limit", "peak", "memory")
    return {"place": str(done.place), "bytes": done.nbytes, **{name: getattr(done, name) for name in names}}


# -- verify -----------------------------------------------------------------------------------------------------------


@click.command(
    epilog="""\b
Examples:
  tenterhook verify acts
  tenterhook verify acts --drop && tenterhook harvest … -o acts
"""
)
@click.argument("place")
@click.option("--drop", is_flag=True, help="Remove damaged shards, so that the same harvest makes them again.")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def verify(place: str, *, drop: bool, json_: bool) -> None:
    """Check everything that is committed in PLACE against its checksums.

    The exit code is 1 if something is damaged. It is 0 if nothing is, or if --drop removed it.
    """
    from tenterhook.harvest.verify import verify as verify_store

    _check_store(place)
    with speaking():
        report = verify_store(place, drop=drop)
    if json_:
        print_json(_reported(report))
    else:
        print_table(report.table())
    if not report and not drop:
        raise click.exceptions.Exit(DIFFERENT)


def _reported(report: Report) -> dict[str, Any]:
    names = ("path", "rows", "shards", "planned", "complete", "stray", "dropped")
    damaged = [{"shard": shard, "file": file, "what": what} for shard, file, what in report.damaged]
    return {"bytes": report.nbytes, "damaged": damaged, **{name: getattr(report, name) for name in names}}
