"""The ``tenterhook`` command."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of this process."""
    try:
        from tenterhook.cli.command import tenterhook
    except KeyboardInterrupt:  # Importing torch takes a second or two.
        sys.exit(130)
    tenterhook.main(prog_name="tenterhook")
