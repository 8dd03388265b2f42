"""The cost of viewing: the page of a network with all its maps, and the command on a large model."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import tenterhook as th
from benchmarks.harness import Row, duration
from benchmarks.resnet import ResNet18
from tenterhook.report.page import write_tapes

MOST_ROUNDS = 7
WRITTEN, LARGEST, USABLE, LISTED = 5.0, 10_000_000, 1.0, 2.0
MODULES = 1001


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    rounds = max(1, min(rounds, MOST_ROUNDS))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from _page(folder, rounds)
        yield from _points(rounds)


def large() -> nn.Module:
    """Return a model of a thousand modules."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Dropout()) for _ in range(200)]
    return nn.Sequential(*blocks)


def _page(folder: Path, rounds: int) -> Iterator[Row]:
    work = "page of resnet18, 224×224: every map and its gradient"
    torch.manual_seed(0)
    model = ResNet18().eval()
    with th.record(model, "**", grad=True) as tape:
        model(torch.randn(1, 3, 224, 224)).max().backward()
    sizes: list[int] = []
    yield _row(work, "written", rounds, WRITTEN, lambda: sizes.append(write_tapes(folder / "page.html", tape)))
    yield Row(work, "bytes", max(sizes), "count", goal=f"≤ {LARGEST:,}", met=max(sizes) <= LARGEST)
    usable = [_usable(folder / "page.html") for _ in range(rounds)]
    yield _judged(work, "usable in Chromium", usable, USABLE)


def _usable(page: Path) -> float:
    """Return the seconds from the start of loading until a point is shown and the page reacts to keys."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.goto(page.as_uri())
        opened.wait_for_selector('.maps .pictures[data-ready="yes"]')
        took = float(opened.evaluate("performance.now()")) / 1e3
        browser.close()
    return took


def _points(rounds: int) -> Iterator[Row]:
    assert sum(1 for _ in large().modules()) == MODULES  # noqa: S101  # what the row claims
    command = [sys.executable, "-m", "tenterhook", "points", "benchmarks.page:large"]
    work = f"tenterhook points, {MODULES - 1:,} modules, imports included"

    # As on a user's machine, Python caches bytecode. The first call of each is not counted.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

    def listed(arguments: list[str]) -> Callable[[], object]:
        def start() -> object:
            return subprocess.run(arguments, check=True, capture_output=True, env=environment)

        start()
        return start

    yield _row(work, "import torch alone", rounds, None, listed([sys.executable, "-c", "import torch"]))
    yield _row(work, "tenterhook points", rounds, LISTED, listed(command))


def _row(work: str, who: str, rounds: int, at_most: float | None, call: Callable[[], object]) -> Row:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return _judged(work, who, seconds, at_most)


def _judged(work: str, who: str, seconds: list[float], at_most: float | None) -> Row:
    best = min(seconds)
    parts = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [best] * 3
    goal = "" if at_most is None else f"≤ {duration(at_most)}"
    met = None if at_most is None else best <= at_most
    return Row(work, who, best, "s", seconds=best, spread=(parts[0], parts[1], parts[2]), goal=goal, met=met)
