"""The subcommands that read tapes: ``show``, ``page`` and ``diff``."""

from __future__ import annotations

import contextlib
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tenterhook._look.numbers import numbers
from tenterhook._look.progress import bar
from tenterhook._tree import describe, show_path, tensors
from tenterhook.cli.differences import Compared, difference_table
from tenterhook.cli.errors import DIFFERENT, INCOMPARABLE, CommandError, missing_package, say, speaking
from tenterhook.cli.limits import check_file
from tenterhook.cli.options import print_json, print_table, size_of
from tenterhook.errors import TenterhookError
from tenterhook.record.tape import Tape, load
from tenterhook.record.tape_table import table
from tenterhook.report.compare import Tolerance, compare, first_difference
from tenterhook.report.execution_order import chosen

__all__ = ["diff", "page", "show"]

TAPE = click.Path(path_type=Path)
MAP_DIMENSIONS = 2


def read_tape(file: Path) -> Tape:
    """Load a tape, after checking that it fits in memory."""
    if file.is_file():
        check_file(file, "Record fewer points, or fewer calls (--keep last).")
    return load(file)


# -- show -------------------------------------------------------------------------------------------------------------


@click.command(
    epilog="""\b
Examples:
  tenterhook show run.th
  tenterhook show run.th 'layer4.**' --json
  tenterhook show run.th conv1 --maps 6
"""
)
@click.argument("file", type=TAPE)
@click.argument("selectors", nargs=-1)
@click.option("--maps", default=0, metavar="N", help="Draw the first N maps of each point.")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def show(file: Path, selectors: tuple[str, ...], *, maps: int, json_: bool) -> None:
    """Print statistics of the values on the tape FILE: all of them, or those that match SELECTORS."""
    with speaking():
        tape = read_tape(file)
        addresses = chosen(tape, selectors)
        if json_:
            failure = tape.notes.get("failure")
            print_json({"values": [row for address in addresses for row in _values(tape, address)], "failure": failure})
            return
        print_table(table(tape, addresses if selectors else None))
        for address in addresses if maps > 0 else ():
            _draw_maps(tape, address, maps)


def _values(tape: Tape, address: str) -> list[dict[str, Any]]:
    try:
        value = tape[address]
    except TenterhookError as error:
        return [{"address": address, "unreadable": str(error)}]
    grads = dict(tensors(tape.grad[address])) if address in tape.grad else {}
    rows = [
        {
            "address": address + show_path(path),
            "shape": None if tensor.is_nested else list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            **_numbers(tensor),
            **({"gradient": _numbers(grads[path])} if grads.get(path) is not None else {}),
        }
        for path, tensor in tensors(value)
    ]
    return rows or [{"address": address, "value": describe(value)}]


def _numbers(tensor: Any) -> dict[str, Any]:
    found = numbers(tensor)
    if found is None:
        return {}
    return {key: part for key, part in asdict(found).items() if key not in ("histogram", "scale")}


def _draw_maps(tape: Tape, address: str, count: int) -> None:
    from rich.console import Console

    from tenterhook._look.layout import lay_out
    from tenterhook.report.terminal_pictures import maps

    console = Console()
    for path, tensor in tensors(tape[address]):
        made = lay_out(tensor)
        if made is None:
            continue
        side = 24 if made.kind == "maps" else 48
        small = made.bounded(count, side, side).values
        titled = [
            (f"{address}{show_path(path)} {number}" if made.kind == "maps" else address, one)
            for number, one in enumerate(small)
        ]
        console.print(maps(titled, color=console.is_terminal))


# -- page -------------------------------------------------------------------------------------------------------------


@click.command(
    epilog="""\b
Examples:
  tenterhook page run.th -o run.html --open
  tenterhook page before.th after.th -o both.html --size 20MB
"""
)
@click.argument("files", nargs=-1, required=True, type=TAPE)
@click.option(
    "--output", "-o", "target", type=click.Path(path_type=Path), help="The page [the first tape's name with .html]."
)
@click.option("--size", default="10MB", show_default=True, help="The largest size of the page.")
@click.option(
    "--maps",
    default=512,
    show_default=True,
    type=click.IntRange(min=1),
    help="The largest number of maps to draw of a value.",
)
@click.option("--title", help="The title of the page.")
@click.option("--open", "open_", is_flag=True, help="Open the page in the browser.")
def page(files: tuple[Path, ...], target: Path | None, size: str, maps: int, title: str | None, *, open_: bool) -> None:
    """Write one HTML page of one or two tape FILES. It opens from disk and needs no network."""
    if len(files) > len(("left", "right")):
        raise CommandError(f"a page shows one tape, or two side by side; got {len(files)}")
    target = target or files[0].with_suffix(".html")
    if target.is_dir():
        raise CommandError(f"{target} is a directory; name a file in it: -o {target / f'{files[0].stem}.html'}")
    if target.suffix.lower() not in (".html", ".htm"):
        raise CommandError(f"{target}: a page is an .html file; write -o {target.with_suffix('.html')}")
    try:
        import PIL  # noqa: F401  # imported first, so that a missing package is reported before the tape is read

        from tenterhook.report.page import LEAST, write_tapes
    except ImportError:
        raise missing_package("pillow", "page") from None
    with speaking():
        most = size_of(size)
        if most < LEAST:
            raise CommandError(f"--size {size}: a page needs at least {LEAST:,} bytes, for its script and its numbers.")
        tapes = {_name(file, files): read_tape(file) for file in files}
        with bar("pictures") as progress, _as_command_error():
            written = write_tapes(target, tapes, size=most, maps=maps, title=title, progress=progress)
        say(f"{target}: {written / 1e6:.1f} MB")
    if open_:
        _open(target)


@contextlib.contextmanager
def _as_command_error() -> Iterator[None]:
    """Convert a ``ValueError`` about the page's options to :class:`CommandError`."""
    try:
        yield
    except ValueError as error:
        raise CommandError(str(error)) from None


def _name(file: Path, files: tuple[Path, ...]) -> str:
    same = len(files) > 1 and files[0].name == files[-1].name
    return str(file) if same else file.name


def _open(target: Path, browse: Callable[[str], bool] = webbrowser.open) -> None:
    if not browse(target.resolve().as_uri()):
        raise CommandError(
            f"the page was written, but no browser could be opened. Open this file in one: {target.resolve()}"
        )


# -- diff -------------------------------------------------------------------------------------------------------------


@click.command(
    epilog="""\b
Examples:
  tenterhook diff reference.th port.th
  tenterhook diff float32.th bfloat16.th --rtol 0.05 --all
"""
)
@click.argument("left", type=TAPE)
@click.argument("right", type=TAPE)
@click.option("--rtol", type=float, help="Relative tolerance [by dtype, as in torch.testing].")
@click.option("--atol", type=float, help="Absolute tolerance [by dtype, as in torch.testing].")
@click.option("--all", "every", is_flag=True, help="Show every point.")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def diff(left: Path, right: Path, rtol: float | None, atol: float | None, *, every: bool, json_: bool) -> None:
    """Find the first point where the values or gradients of two tapes differ, and by how much.

    The number of points that were compared is printed. A point that only one of the tapes has is a difference too;
    --all shows these points. The exit code is 0 if nothing differs, 1 if something does, and 5 if almost nothing could
    be compared: fewer than a tenth of the points of the smaller tape are on both.
    """
    with speaking():
        found = compare(read_tape(left), read_tape(right), Tolerance(rtol, atol))
    first, compared = first_difference(found), Compared.of(found)
    if json_:
        rows = [asdict(each) for each in found]
        print_json({"first": None if first is None else first.address, **asdict(compared), "points": rows})
    else:
        print_table(difference_table(found, first, every=every))
    if compared.hardly:
        say(compared.warning, err=True)
        raise click.exceptions.Exit(INCOMPARABLE)
    if first is not None:
        raise click.exceptions.Exit(DIFFERENT)
