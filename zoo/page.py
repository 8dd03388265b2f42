"""The page with the results of the zoo: docs/zoo.md."""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

__all__ = ["text", "write"]

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "zoo.md"
Found = dict[str, dict[str, dict[str, Any]]]

HEAD = """# The zoo

Every architecture that can be built without a download is checked: the model types of transformers in a small
configuration, timm's and torchvision's models on small images, and a list of our own with recurrent nets, PyTorch's
transformer, quantised, parametrized, pruned and adapted modules. `make zoo` runs it and writes this page.

For each model, in its own process and with fixed seeds, the output of every module and the first argument of every
call are recorded, with gradients, and compared:

1. outputs and the gradients of all parameters with those of a plain run, bit for bit;
2. every recorded value of every call with the copy that a plain forward hook makes, structures included;
3. gradients at outputs with those of `register_hook` on the output, where the output is a plain tensor of the module
   itself that is not changed in place later;
4. the model and the process before and after, except for what the model changes itself;
5. no tensor is left when the tape is deleted.

*Reordered* is a model for which 1 fails in the last bits, and holds if the modules that return their input are left
out. Such a module's output gets its own node in the graph, so that its gradient can be separated from that of the
input. If the output then has several uses, or is changed in place, while the input has other uses, autograd adds the
same gradients in another order or layout.

A model that does not run without tenterhook, or whose plain runs differ from each other, is listed below and not
counted.
"""


def write(found: Found) -> None:
    """Write the page atomically."""
    part = PAGE.with_suffix(".part")
    part.write_text(text(found), encoding="utf-8")
    part.replace(PAGE)


def text(found: Found) -> str:
    """Return the text of the page."""
    sections = [HEAD, _counts(found), _failures(found), _reordered(found), *_families(found), _excluded(found)]
    return "\n".join(section for section in sections if section)


def _counts(found: Found) -> str:
    head = "| from | models | families | passed | reordered | failed | not counted | modules | values | gradients |"
    rows = [head, "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for source, results in found.items():
        if results:
            rows.append(_row(source, list(results.values())))
    rows.append(_row("together", [result for results in found.values() for result in results.values()]))
    return "## Counts\n\n" + "\n".join(rows) + "\n"


def _row(name: str, results: list[dict[str, Any]]) -> str:
    counts = Counter(result["status"] for result in results)
    counted = [result for result in results if result["status"] != "excluded"]
    families = len({result["family"] for result in counted})
    sums = [f"{sum(result.get(key, 0) for result in counted):,}" for key in ("modules", "values", "gradients")]
    numbers = [len(counted), families, *(counts[status] for status in ("passed", "reordered", "failed", "excluded"))]
    return f"| {name} | {' | '.join(map(str, [*numbers, *sums]))} |"


def _failures(found: Found) -> str:
    rows = [f"| {name} | {_cell('; '.join(result['problems'][:3]))} |" for name, result in _with(found, "failed")]
    if not rows:
        return "## Failures\n\nNone.\n"
    return "\n".join(["## Failures", "", "| model | what was found |", "|---|---|", *rows, ""])


def _reordered(found: Found) -> str:
    rows = [f"| {name} | {_cell(result['order'])} |" for name, result in _with(found, "reordered")]
    return "\n".join(["## Reordered", "", "| model | first difference |", "|---|---|", *rows, ""]) if rows else ""


def _with(found: Found, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for source, results in found.items():
        yield from ((f"{source}/{name}", result) for name, result in results.items() if result["status"] == status)


def _families(found: Found) -> Iterator[str]:
    for source, results in found.items():
        counted: dict[str, list[str]] = {}
        for name, result in results.items():
            if result["status"] == "passed":
                counted.setdefault(result["family"], []).append(name)
        if counted:
            shown = ", ".join(_family(family, names) for family, names in sorted(counted.items()))
            yield f"## Passed, of {source}\n\n{shown}\n"


def _family(family: str, names: list[str]) -> str:
    return family if len(names) == 1 else f"{family} ({len(names)})"


def _excluded(found: Found) -> str:
    groups: dict[str, list[str]] = {}
    for source, results in found.items():
        for name, result in sorted(results.items()):
            if result["status"] == "excluded":
                groups.setdefault(_group(result["reason"]), []).append(f"{source}/{name}")
    rows = [f"| {_cell(group)} | {len(names)} | {', '.join(names)} |" for group, names in sorted(groups.items())]
    return "\n".join(["## Not counted", "", "| why | models | which |", "|---|--:|---|", *rows, ""])


def _group(reason: str) -> str:
    """Return the kind of a reason, without its details."""
    kind = re.match(r"(does not run|does not build|no fitting input|two plain runs differ|[^:]*)", reason)
    error = re.search(r": (\w*(?:Error|Exception))", reason)
    return f"{kind[0] if kind else reason}{f' ({error[1]})' if error else ''}"


def _cell(text: str) -> str:
    return re.sub(r"/\S*/", "", text).replace("|", "\\|").replace("\n", " ")
