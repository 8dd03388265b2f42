"""The ``tenterhook cost`` subcommand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tenterhook.cli.errors import say
from tenterhook.cli.options import FORMS, AskedPoints, model_options, print_json, print_table
from tenterhook.cli.run import calling
from tenterhook.cli.signature import check_call
from tenterhook.cost.verb import cost as cost_of

__all__ = ["cost"]

COLUMNS = ("flops", "own_flops", "backward_flops", "parameters", "activation_bytes", "saved_bytes", "own_saved_bytes")


@click.command(
    epilog="""\b
Examples:
  tenterhook cost mymodels.py:Net --input 8x3x64x64
  tenterhook cost transformers:GPT2Config --device meta -i 'input_ids=int:1x1024<50257'
  tenterhook cost mymodels.py:Net -i 8x3x64x64 --sort saved_bytes
  tenterhook cost mymodels.py:Net -i 8x3x64x64 --time -o cost.html
\b
"""
    + FORMS
)
@model_options
@click.option("--forward", is_flag=True, help="Run only the forward, without gradients.")
@click.option("--time", "timed", is_flag=True, help="Measure the time of each module.")
@click.option("--try", "tries", is_flag=True, help="Try the advice about activation checkpointing.")
@click.option("--sort", "column", type=click.Choice(COLUMNS), help="List the modules with the largest number first.")
@click.option("--lines", metavar="SELECTOR", help="Print the cost of each line of these forwards.")
@click.option("--output", "-o", "file", type=click.Path(path_type=Path), help="Write a page.")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def cost(  # each is an option
    asked: AskedPoints,
    column: str | None,
    lines: str | None,
    file: Path | None,
    *,
    forward: bool,
    timed: bool,
    tries: bool,
    json_: bool,
) -> None:
    """Print what one pass of MODEL costs: FLOPs, memory saved for backward, peak memory, and time.

    With --device meta nothing is computed, so MODEL may be larger than the memory.
    """
    check_call(asked.model, asked.inputs)
    options: dict[str, Any] = {"backward": not forward, "time": timed, "lines": lines, "try_advice": tries}
    with calling(asked.model):
        found = cost_of(asked.model, *asked.inputs.args, **options, **asked.inputs.kwargs)
    if file is not None:
        from tenterhook.report.verb import page

        say(f"{file}: {page(file, found):,} bytes", err=json_)
    if json_:
        print_json(found.to_dict())
        return
    if file is None:
        print_table(found.sorted_table(column).table() if column else found.table())
    if lines is not None:
        print_table(found.line_table())
