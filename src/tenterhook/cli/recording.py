"""The ``tenterhook record`` subcommand."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from tenterhook._draw import short_number
from tenterhook._look.progress import bar
from tenterhook._text import counted
from tenterhook.address import resolve
from tenterhook.cli.edits import edits_of_files, read_edits
from tenterhook.cli.errors import FAILED, WRONG, CommandError, say
from tenterhook.cli.options import FORMS, AskedPoints, model_options, print_json
from tenterhook.cli.run import LOSSES, RunRequest, run
from tenterhook.cli.signature import check_call
from tenterhook.record.tape import Tape
from tenterhook.record.tape_table import failed

__all__ = ["record"]


@click.command(
    epilog="""\b
Examples:
  tenterhook record mymodels.py:Net --input 1x3x64x64 -o run.th
  tenterhook record ./gpt2 'transformer.h.*' '**.attn:attn_weights' -i 'text:The cat sat' --grad -o run.th
  tenterhook record transformers:BertConfig 'encoder.layer.3' -i 'input_ids=int:1x16<30522' --stop -o run.th
  tenterhook record mymodels.py:Net -i x.npy --edit 'layer2=zero(at=at[:, 3])' -o edited.th
  tenterhook record ./gpt2 -i 'text:The cat sat' --edits calm.edits -o steered.th
\b
"""
    + FORMS
)
@model_options
@click.argument("selectors", nargs=-1)
@click.option("--output", "-o", "file", default="run.th", show_default=True, type=click.Path(path_type=Path))
@click.option("--grad", is_flag=True, help="Also run backward, and record gradients.")
@click.option(
    "--loss",
    type=click.Choice(["auto", *LOSSES]),
    default="auto",
    show_default=True,
    help="The loss for backward: the sum, mean or max of the output; auto is the model's own loss, or else the sum.",
)
@click.option(
    "--edit",
    "edits",
    multiple=True,
    metavar="SELECTOR=EDIT",
    help="An edit, for example 'h.5=zero()'; can be repeated.",
)
@click.option(
    "--edits",
    "files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A file that th.save_edits wrote; its edits run before those of --edit.",
)
@click.option("--stop", is_flag=True, help="Stop the run after the last point.")
@click.option("--keep", default="all", show_default=True, metavar="all|last|N", help="The calls of a module to keep.")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def record(  # noqa: PLR0913  # each is an option
    asked: AskedPoints,
    selectors: tuple[str, ...],
    file: Path,
    loss: Any,
    edits: tuple[str, ...],
    files: tuple[Path, ...],
    keep: str,
    *,
    grad: bool,
    stop: bool,
    json_: bool,
) -> None:
    """Run MODEL once and write the values at SELECTORS (by default the outputs of all modules) to a tape.

    If the model fails, the tape has the values recorded before, the module that failed and its inputs, and the exit
    code is 3. A run that records nothing does not replace an existing file.
    """
    if stop and grad:
        raise CommandError(
            "--stop ends the run before there is a loss, so --grad cannot run backward. Leave out one of the two."
        )
    changes = edits_of_files(files, asked.model)
    for selector, made in read_edits(edits).items():
        changes.setdefault(selector, []).extend(made)
    wanted = RunRequest(list(selectors), grad, loss, changes, stop, _keep(keep))
    check_call(asked.model, asked.inputs)
    _check_place(file)
    with _progress(asked, wanted) as passed, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tape, error = run(asked.model, asked.inputs, wanted, passed)
    tape.notes["model"] = _about(asked)
    tape.notes["edits"] = [*map(str, files), *edits]
    for text in dict.fromkeys(str(each.message) for each in said):
        say(f"warning: {text}", err=True)
    if kept := not tape and file.exists():
        _tell_kept(tape, file, json_=json_)
    else:
        tape.save(file)
        _tell(tape, file, json_=json_)
    if error is not None or kept:
        raise click.exceptions.Exit(FAILED if error is not None else WRONG)


def _check_place(file: Path) -> None:
    """Raise an error before the run, which may be long, if the file cannot be written."""
    if file.is_dir():
        raise CommandError(f"{file} is a directory; name a file in it: -o {file / 'run.th'}")
    if not file.parent.is_dir():
        raise CommandError(f"{file} cannot be written: there is no directory {file.parent}. Make it first.")


def _tell_kept(tape: Tape, file: Path, *, json_: bool) -> None:
    """Report that an empty tape did not replace an existing file."""
    say(f"{file} is not changed: the run recorded no value.", err=True)
    if json_:
        print_json({"tape": None, "values": 0, "gradients": 0, "bytes": 0, "failure": tape.notes.get("failure")})
        return
    _tell_failure(tape)


def _tell(tape: Tape, file: Path, *, json_: bool) -> None:
    counts = {"values": len(tape), "gradients": len(tape.grad), "bytes": file.stat().st_size}
    if json_:
        print_json({"tape": str(file), **counts, "failure": tape.notes.get("failure")})
        return
    size = short_number(counts["bytes"]).replace("k", " k").replace("M", " M").replace("B", " G")
    say(f"{file}: {counted(len(tape), 'value')}, {counted(len(tape.grad), 'gradient')}, {size}B")
    _tell_failure(tape)


def _tell_failure(tape: Tape) -> None:
    for line in failed(tape):
        say(line, err=True)


def _about(asked: AskedPoints) -> dict[str, Any]:
    model = asked.model
    return {
        "name": asked.text,
        "class": type(model).__name__,
        "modules": sum(1 for _ in model.modules()),
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
    }


def _keep(text: str) -> Any:
    if text in ("all", "last"):
        return text
    if not text.isdigit() or not int(text):
        raise CommandError(f"--keep is all, last, or a number of calls; got {text!r}")
    return int(text)


@contextlib.contextmanager
def _progress(asked: AskedPoints, wanted: RunRequest) -> Iterator[Callable[[str], None]]:
    """Show a progress bar that advances the first time each point is reached."""
    points = len(resolve(asked.model, wanted.selectors or "**"))
    seen: set[str] = set()
    with bar("points") as tell:

        def passed(address: str) -> None:
            seen.add(address)
            tell(len(seen), points)

        yield passed
