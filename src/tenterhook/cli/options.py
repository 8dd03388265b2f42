"""Options that several subcommands share, and functions that print their results."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import nn

from tenterhook._draw import Table, as_rich, as_text
from tenterhook._text import printable_json
from tenterhook.cli.completing import complete_model
from tenterhook.cli.errors import CommandError, speaking, write
from tenterhook.cli.inputs import FORMS as INPUTS
from tenterhook.cli.inputs import Inputs, read_inputs
from tenterhook.cli.models import FORMS as MODELS
from tenterhook.cli.models import load_model, settings
from tenterhook.cli.shell_advice import for_a_shell

__all__ = [
    "DTYPES",
    "FORMS",
    "AskedPoints",
    "as_json",
    "make_model",
    "model_alone",
    "model_options",
    "print_json",
    "print_table",
    "size_of",
]

F = TypeVar("F", bound=Callable[..., Any])

FORMS = "\n\n\b\n".join((MODELS, INPUTS.replace("An input", "INPUT")))
"""text below the help of every command that takes a model"""

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class AskedPoints:
    """The loaded model and its inputs, as the command line names them."""

    text: str
    model: nn.Module
    inputs: Inputs
    folder: Path | None
    """directory to load a tokenizer from"""
    again: Callable[[], nn.Module]
    """makes the same model again, also in another process"""


def model_options(function: F) -> F:
    """Add MODEL, its options and its inputs to a command.

    The command receives them as one :class:`AskedPoints`.
    """
    with_size = click.option("--image-size", metavar="HxW", help="Resize images to this, for example 224x224.")
    with_inputs = click.option(
        "--input",
        "-i",
        "inputs",
        multiple=True,
        metavar="INPUT",
        help="An argument for the model, see below; can be repeated.",
    )
    return with_inputs(with_size(model_alone(function)))


def model_alone(function: F) -> F:
    """Add MODEL and its options, without inputs, to a command.

    The command receives them as one :class:`AskedPoints`.
    """

    @click.argument("model", shell_complete=complete_model)
    @click.option(
        "--set",
        "pairs",
        multiple=True,
        metavar="KEY=VALUE",
        help="An argument of the class or function that makes the model; can be repeated.",
    )
    @click.option(
        "--weights", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A state dict to load."
    )
    @click.option(
        "--tokenizer",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="The directory of a tokenizer.",
    )
    @click.option("--seed", default=0, show_default=True, help="Seed of random weights and inputs.")
    @click.option("--device", help="The device to run on, for example cuda.")
    @click.option("--dtype", type=click.Choice(list(DTYPES)), help="Convert the model and floating-point inputs.")
    @click.option("--train", is_flag=True, help="Use training mode, with dropout and batch statistics.")
    @functools.wraps(function)
    def command(**given: Any) -> Any:
        names = ("model", "pairs", "weights", "seed", "device", "dtype", "train")
        making = {name: given.pop(name) for name in names}
        reading = {name: given.pop(name, default) for name, default in READING.items()}
        with speaking():
            asked = _asked(making, **reading)
            with for_a_shell(asked.text):
                return function(asked=asked, **given)

    return command  # type: ignore[return-value]


READING: dict[str, Any] = {"inputs": (), "tokenizer": None, "image_size": None}
"""defaults of the input options, for a command without inputs"""


def _asked(
    making: dict[str, Any], *, inputs: tuple[str, ...], tokenizer: Path | None, image_size: str | None
) -> AskedPoints:
    text, device, dtype = making["model"], making["device"], making["dtype"]
    made = make_model(**making)
    torch.manual_seed(making["seed"])  # Random inputs must not depend on how the model was made.
    folder = tokenizer or (Path(text) if Path(text).is_dir() else None)
    read = read_inputs(inputs, made, folder=folder, image_size=_size(image_size))
    again = functools.partial(make_model, **making)
    return AskedPoints(text, made, read.to(device, DTYPES.get(dtype or "")), folder, again)


def make_model(
    *,
    model: str,
    pairs: tuple[str, ...],
    weights: Path | None,
    seed: int,
    device: str | None,
    dtype: str | None,
    train: bool,
) -> nn.Module:
    """Load the model and move it to the requested device, dtype and mode."""
    torch.manual_seed(seed)
    made = load_model(model, settings(pairs), weights)
    made.train(train)
    with speaking("the model could not be moved", debug=False):
        made.to(device=device, dtype=DTYPES[dtype] if dtype else None)
    return made


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?", text)
    if found is None:
        raise CommandError(f"--image-size is HEIGHTxWIDTH, for example 224x224; got {text!r}")
    return int(found[1]), int(found[2] or found[1])


def size_of(text: str) -> int:
    """Parse a number of bytes.

    >>> size_of("10MB"), size_of("500k"), size_of("1.5G")
    (10000000, 500000, 1500000000)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]?)b?", text.strip().lower())
    if found is None:
        raise CommandError(f"a size is a number of bytes, for example 10MB; got {text!r}")
    return int(float(found[1]) * UNITS[found[2]])


def print_table(table: Table) -> None:
    """Print a table: in color and fitted to the width on a terminal, otherwise complete and as plain text."""
    if not _in_terminal():
        write(as_text(table))
        return
    from rich.console import Console

    Console().print(as_rich(table, also="--json"))


def _in_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    write(as_json(value))


def as_json(value: Any) -> str:
    """Return JSON that every parser accepts. NaN and infinity become null."""
    return printable_json(json.dumps(_plain(value), ensure_ascii=False, indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
