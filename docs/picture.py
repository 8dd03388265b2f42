"""Draw the demo as docs/demo.svg, the picture in the README. Run it from the root of the repository."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from rich.console import Console


def main() -> None:
    """Run the demo in a console that remembers, and write down what it showed."""
    console = Console(record=True, force_terminal=True, width=100, color_system="truecolor", quiet=False)
    runpy.run_path("examples/digits.py")["main"](console)
    svg = console.export_svg(title="make demo")
    # The picture must not fetch a font from anywhere: the reader's own monospace one will do.
    svg = re.sub(r"@font-face\s*{[^}]*}", "", svg).replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    Path("docs/demo.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
