"""The command line interface, for ``python -m tenterhook``."""

from tenterhook.cli import main

if __name__ == "__main__":
    main()
