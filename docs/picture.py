"""Draw docs/demo.svg, docs/page.png and docs/figures.png. Run it from the root of the repository."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console

POINT = "norm1"


def main() -> None:
    """Run the demo in a console that remembers, write down what it showed, and look at the page that it wrote."""
    console = Console(record=True, force_terminal=True, width=100, color_system="truecolor", quiet=False)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "digits.html"
        runpy.run_path("examples/digits.py")["main"](console, page)
        photograph(page, Path("docs/page.png"))
        photos = Path(folder) / "photos.html"
        runpy.run_path("examples/photos.py")["main"](Path(folder) / "photos.png", photos)
        photograph(photos, Path("docs/figures.png"), point="conv4")
        svg = console.export_svg(title="make demo").replace(folder, "~")
    # The picture must not fetch a font from anywhere: the reader's own monospace one will do.
    svg = re.sub(r"@font-face\s*{[^}]*}", "", svg).replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    Path("docs/demo.svg").write_text(svg, encoding="utf-8")


def photograph(page: Path, target: Path, point: str = POINT) -> None:
    """The page in Chromium, at one of its points, in few colours so that the file stays small."""
    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1280, "height": 980}, color_scheme="light")
        opened.goto(page.resolve().as_uri() + f"#{point}")
        opened.wait_for_selector('.maps .pictures[data-ready="yes"]')
        opened.wait_for_timeout(500)
        opened.screenshot(path=target)
        browser.close()
    with Image.open(target) as picture:
        picture.convert("RGB").quantize(256).save(target, optimize=True)


if __name__ == "__main__":
    main()
