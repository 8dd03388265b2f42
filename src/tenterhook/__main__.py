"""``python -m tenterhook``: the command."""

from tenterhook.cli import main

if __name__ == "__main__":
    main()
