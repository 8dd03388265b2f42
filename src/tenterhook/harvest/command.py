"""The commands ``harvest`` and ``verify``, made when they are asked for: click is loaded then, and not before."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenterhook.errors import HarvestError

if TYPE_CHECKING:
    import click
    from torch import nn

__all__ = ["commands", "harvest_command", "model_of", "verify_command"]

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def commands() -> dict[str, click.Command]:
    """Both, by name, for whoever registers them."""
    return {"harvest": harvest_command(), "verify": verify_command()}


def harvest_command() -> click.Command:
    """``tenterhook harvest MODEL SELECTOR... --data DATA -o PLACE``."""
    import click

    @click.command("harvest", short_help="Store what passes at points, over a whole data set.")
    @click.argument("model")
    @click.argument("selectors", nargs=-1, required=True, metavar="SELECTOR...")
    @click.option("--data", required=True, help=".npy, .safetensors, .parquet, .txt, or module:name of batches.")
    @click.option("-o", "--to", required=True, help="A directory, or a URL such as s3://bucket/acts.")
    @click.option("--rows", type=click.Choice(["sample", "token"]), default="sample", show_default=True)
    @click.option("--reduce", type=click.Choice(["last", "mean", "max"]), help="One row of each sample's tokens.")
    @click.option("--dtype", help="Convert to a type of torch, such as bfloat16.")
    @click.option("--batch-size", type=int, help="Samples in a batch.")
    @click.option("--shard-rows", type=int, help="Rows in a shard, about.")
    @click.option("--shard-size", help="The same in bytes: 512M.")
    @click.option("--memory", default="256M", show_default=True, help="Bytes on their way to the disk at most.")
    @click.option("--tokenizer", help="For text: a name or a directory of transformers.")
    @click.option("--device", help="Where the model runs, such as cuda.")
    @click.option("--engine", type=click.Choice(["auto", "local", "ranks", "ray"]), default="auto", show_default=True)
    @click.option("--workers", type=int, help="With ray: how many.")
    @click.option("--address", help="With ray: the cluster.")
    @click.option("--progress/--no-progress", default=None, help="A bar; by default in a terminal.")
    def harvest(model: str, selectors: tuple[str, ...], **options: Any) -> None:
        """Store what passes at the SELECTORs of MODEL, row by row.

        MODEL is module:name or file.py:name of a model or of a function that makes one, or a name or directory of
        transformers. The same command again goes on where it stopped.
        """
        _harvest(model, selectors, options)

    return harvest


def verify_command() -> click.Command:
    """``tenterhook verify PLACE [--drop]``."""
    import click

    @click.command("verify", short_help="Compare a store with its checksums.")
    @click.argument("place")
    @click.option("--drop", is_flag=True, help="Take back damaged shards, so that the same harvest makes them again.")
    def verify(place: str, *, drop: bool) -> None:
        """Compare everything that was committed in PLACE with its checksums; ends with 1 if something is damaged."""
        from rich.console import Console

        from tenterhook.harvest.verifying import verify as check

        report = check(place, drop=drop)
        Console(soft_wrap=True).print(report)
        sys.exit(0 if report else 1)

    return verify


def _harvest(model: str, selectors: tuple[str, ...], options: dict[str, Any]) -> None:
    import torch
    from rich.console import Console

    from tenterhook.harvest.verb import harvest

    device, dtype, tokenizer = options.pop("device"), options.pop("dtype"), options.pop("tokenizer")
    data, size = options.pop("data"), options.pop("shard_size")
    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise HarvestError(f"--dtype is a type of torch, such as bfloat16; got {dtype!r}")
    done = harvest(
        model_of(model, device),
        data if Path(data).suffix and ":" not in data else found(data),
        *selectors,
        dtype=None if dtype is None else getattr(torch, dtype),
        tokenizer=None if tokenizer is None else _tokenizer(tokenizer),
        shard_bytes=None if size is None else nbytes(size),
        **options | {"memory": nbytes(options["memory"])},
    )
    Console(soft_wrap=True).print(done)


def nbytes(text: str) -> int:
    """A number of bytes as people write it.

    >>> nbytes("512M"), nbytes("1.5G"), nbytes("4096")
    (536870912, 1610612736, 4096)
    """
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError) as error:
        raise HarvestError(f"{text!r} is no number of bytes; write 512M or 2G") from error


def model_of(text: str, device: str | None = None) -> nn.Module:
    """The model that a text names."""
    from torch import nn

    model = found(text) if ":" in text else _pretrained(text)
    if not isinstance(model, nn.Module) and callable(model):
        model = model()
    if not isinstance(model, nn.Module):
        raise HarvestError(f"{text} is a {type(model).__name__}, and no model or function that makes one")
    return (model if device is None else model.to(device)).train(mode=False)


def found(text: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` means."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise HarvestError(f"{text!r} is neither a file that is there nor module:name")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        return getattr(module, name)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise HarvestError(f"{text!r} cannot be loaded: {error}") from error


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _pretrained(name: str) -> Any:
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise ModuleNotFoundError(f'{name!r} needs transformers: pip install "tenterhook[hf]"') from error
    return AutoModel.from_pretrained(name)


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)
