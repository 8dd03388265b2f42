"""The ``tenterhook`` command."""

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of this process."""
    from tenterhook.cli.command import tenterhook

    tenterhook.main(prog_name="tenterhook")
