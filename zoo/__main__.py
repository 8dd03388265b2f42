"""Run the zoo: ``python -m zoo [source ...]``."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from zoo import page, results
from zoo.isolate import run_apart
from zoo.models import SOURCES, installed, load

Step = Callable[[str, dict[str, object]], None]


def main() -> int:
    """Check the models that have no result yet, then write the page."""
    options = _options()
    began = time.monotonic()
    for source in options.source or SOURCES:
        if not installed(SOURCES[source]):
            print(f"{source}: not installed, left out")
            continue
        _run(source, options, began)
    found = {source: results.read(source) for source in SOURCES}
    page.write(found)
    counts = Counter(result["status"] for of_one in found.values() for result in of_one.values())
    print(", ".join(f"{counts[status]} {status}" for status in ("passed", "reordered", "failed", "excluded")))
    return 1 if counts["failed"] else 0


def _run(source: str, options: argparse.Namespace, began: float) -> None:
    load(SOURCES[source])
    done = {} if options.again else results.read(source)
    names = [pair for pair in SOURCES[source].names() if fnmatch.fnmatch(pair[0], options.only)]
    names = [pair for pair in names[: options.first] if pair[0] not in done]
    for step, (name, family) in _progress(source, names):
        if time.monotonic() - began > 60 * options.minutes:
            print(f"{source}: the time is up; run again to go on")
            return
        result = {"name": name, "family": family, **run_apart(SOURCES[source], name, options.seconds)}
        results.append(source, result)
        step(name, result)


def _progress(source: str, names: list[tuple[str, str]]) -> Iterator[tuple[Step, tuple[str, str]]]:
    """Yield the names, each with a function that reports its result."""
    console = Console()
    if not console.is_terminal:
        yield from ((_say, pair) for pair in names)
        return
    columns = (TextColumn("{task.description:>40.40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # The bar must not refresh by itself: that needs a thread, and processes are forked here.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task(source, total=len(names))

        def step(name: str, result: dict[str, object]) -> None:
            if result["status"] == "failed":
                progress.print(f"[red]failed[/] {source}/{name}: {result['problems']}", markup=True)
            progress.update(task, advance=1, description=f"{source}/{name}", refresh=True)

        yield from ((step, pair) for pair in names)


def _say(name: str, result: dict[str, object]) -> None:
    detail = result.get("problems") or result.get("reason") or result.get("order") or ""
    print(f"{result['status']:10}{name} {result['seconds']} s {detail}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zoo", description="Check tenterhook on every architecture.")
    parser.add_argument("source", nargs="*", help=f"which to run, of: {', '.join(SOURCES)} (all of them)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names that match, such as 'bert*'")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--first", type=int, metavar="N", help="no more than the first N of each source")
    parser.add_argument("--seconds", type=float, default=30, help="the time for one model (%(default)s)")
    parser.add_argument("--minutes", type=float, default=600, help="the time for all of them (%(default)s)")
    options = parser.parse_args()
    if unknown := set(options.source) - set(SOURCES):
        parser.error(f"no such source: {', '.join(sorted(unknown))}; there is {', '.join(SOURCES)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
