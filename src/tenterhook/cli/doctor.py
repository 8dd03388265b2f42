"""``tenterhook doctor``: installed versions, and the features that work with them."""

from __future__ import annotations

import click

from tenterhook.cli.options import print_json
from tenterhook.doctor.verb import doctor as look

__all__ = ["doctor"]

UNAVAILABLE = 1  # the exit code


@click.command(
    epilog="""\b
Examples:
  tenterhook doctor
  tenterhook doctor --json > doctor.json
\b
The exit code is 1 if a feature is unavailable, otherwise 0.
"""
)
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def doctor(*, json_: bool) -> None:
    """Print the versions, features and packages of this installation, for a bug report.

    Each feature is checked by a small run on the CPU, which takes a few seconds. Home directories, user names and
    values that may be secrets are left out.
    """
    found = look()
    if json_:
        print_json(found.to_dict())
    else:
        click.echo(str(found))  # Plain text in a terminal too, because users copy it into bug reports.
    if found.unavailable:
        raise click.exceptions.Exit(UNAVAILABLE)
