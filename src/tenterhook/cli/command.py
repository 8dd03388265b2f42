"""The ``tenterhook`` command group, and the subcommands that inspect a model: ``points`` and ``audit``."""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

import click

from tenterhook._version import __version__
from tenterhook.address import Point, Selection, Site
from tenterhook.audit.verb import audit as audit_of
from tenterhook.cli.costing import cost
from tenterhook.cli.doctor import doctor
from tenterhook.cli.errors import run_command
from tenterhook.cli.harvesting import harvest, verify
from tenterhook.cli.options import FORMS, AskedPoints, model_options, print_json, print_table
from tenterhook.cli.recording import record
from tenterhook.cli.run import calling
from tenterhook.cli.signature import check_call
from tenterhook.cli.tapes import diff, page, show
from tenterhook.record.points import points as points_of

__all__ = ["tenterhook"]

EXAMPLES = (
    """\b
List the points of a model, record a run, look at the tape:
  tenterhook points mymodels.py:Net
  tenterhook record mymodels.py:Net '**' --input 1x3x64x64 --grad -o run.th
  tenterhook show run.th
  tenterhook page run.th -o run.html --open
\b
A Hugging Face model on disk; points inside an attention layer are shown beside its source:
  tenterhook points ./gpt2 'transformer.h.0.attn:*'
  tenterhook record ./gpt2 '**.attn' -i 'text:The cat sat' -o a.th
\b
Find the first difference between two runs:
  tenterhook diff before.th after.th
\b
See where memory and time go:
  tenterhook cost mymodels.py:Net --input 8x3x64x64
\b
Store the activations of a whole data set, for probes and sparse autoencoders:
  tenterhook harvest ./gpt2 transformer.h.6 --data corpus.txt --rows token -o acts
  tenterhook verify acts
\b
Exit codes: 0 success, 1 a difference or damage, 2 a wrong command line, 3 the model failed, 4 an unusable file,
5 nothing to compare, 6 a bug in tenterhook, 130 interrupted, 141 the output pipe was closed.
\b
"""
    + FORMS
)


class Tenterhook(click.Group):
    """The command group. It accepts ``--debug`` before and after the name of the subcommand.

    Users add ``--debug`` at the end of a command line that failed.
    """

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run the command and exit with one of the codes listed in :mod:`tenterhook.cli.errors`."""
        given = list(options["args"] if options.get("args") is not None else (args[0] if args else sys.argv[1:]))
        debug = "--debug" in given[: given.index("--") if "--" in given else None]
        run_command(functools.partial(super().main, *args, **{**options, "standalone_mode": False}), debug=debug)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        if "--debug" in args[1:end]:
            args = ["--debug", *(each for each in args[:end] if each != "--debug"), *args[end:]]
        return super().parse_args(ctx, args)


@click.group(
    cls=Tenterhook, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="tenterhook")
@click.option("--debug", is_flag=True, help="Print the traceback of an error.")
def tenterhook(*, debug: bool) -> None:
    """Record, edit, compare and store the values inside a PyTorch model."""
    del debug  # `errors.show_debug` reads it from the context.


@tenterhook.command(
    epilog="""\b
Examples:
  tenterhook points mymodels:resnet
  tenterhook points mymodels.py:Net 'layer4.**' --input 1x3x224x224
  tenterhook points transformers:GPT2Config --set n_layer=2 'transformer.h.0.attn:*'
\b
"""
    + FORMS
)
@model_options
@click.argument("selectors", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Show identical siblings one by one, not once.")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def points(asked: AskedPoints, selectors: tuple[str, ...], *, every: bool, json_: bool) -> None:
    """Print the tree of MODEL, or the points that match SELECTORS.

    With --input, MODEL is called once, and the tree shows shapes and numbers of calls. Points inside a forward
    (SELECTOR such as 'h.0.attn:*') are shown beside their source.
    """
    with calling(asked.model):
        found = points_of(asked.model, *selectors, inputs=_inputs(asked))
    if json_:
        print_json(_described(found))
    else:
        print_table(found._table(fold=not every))  # `print_table` writes plain text to a pipe


def _inputs(asked: AskedPoints) -> Any:
    if not asked.inputs:
        return None
    check_call(asked.model, asked.inputs)
    return asked.inputs.whole


def _described(found: Selection) -> list[dict[str, Any]]:
    return [_point(point, found) for point in found]


def _point(point: Point, found: Selection) -> dict[str, Any]:
    made: dict[str, Any] = {"address": str(point), "site": point.site.value, "module": type(point.module).__name__}
    if point.site is Site.RETURN:
        made["parameters"] = sum(tensor.numel() for tensor in point.module.parameters())
    if point.tensor is not None:
        made["shape"] = list(point.tensor.shape)
    seen = found.seen.get(point.address)
    if seen is not None:
        made |= {"calls": seen.calls, "output": seen.shape}
    if point.spot is not None:
        made["where"] = point.spot.where
    return made


@tenterhook.command(
    epilog="""\b
Examples:
  tenterhook audit mymodels:wrapped
  tenterhook audit mymodels.py:Net --input 8x3x64x64 --json
\b
"""
    + FORMS
)
@model_options
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def audit(asked: AskedPoints, *, json_: bool) -> None:
    """List every hook on MODEL and in the process: its owner, the order of the hooks, and what can go wrong.

    With --input, MODEL runs a few times to measure the cost of each hook.
    """
    with calling(asked.model):
        found = audit_of(asked.model, _inputs(asked))
    if not json_:
        print_table(found._table())  # `print_table` writes plain text to a pipe
        return
    print_json(
        [
            {
                "address": row.address,
                "kind": row.kind.value,
                "who": row.who.name,
                "where": row.who.short,
                "order": row.order,
                "flags": list(row.flags),
                "risks": [{"name": risk.name, "why": risk.why, "fix": risk.fix} for risk in row.risks],
                "cost": None if row.cost is None else {"calls": row.cost.calls, "microseconds": row.cost.microseconds},
            }
            for row in found
        ]
    )


@tenterhook.command(
    epilog="""\b
Examples:
  tenterhook completion bash >> ~/.bashrc
  tenterhook completion zsh >> ~/.zshrc
  tenterhook completion fish > ~/.config/fish/completions/tenterhook.fish
"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is not None:
        click.echo(found(tenterhook, {}, "tenterhook", "_TENTERHOOK_COMPLETE").source())


for command in (record, show, page, diff, cost, harvest, verify, doctor):
    tenterhook.add_command(command)
