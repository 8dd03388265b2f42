"""Run every case with every tool, and write the table: ``python -m hazards [tool ...]``."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.peers.environment import environment
from hazards.apart import BROKEN, CANNOT, RIGHT, WRONG
from hazards.cases import CASES
from hazards.elsewhere import ELSEWHERE
from hazards.peers import PACKAGES
from hazards.tools import TOOLS

__all__ = ["main", "page"]

ROOT = Path(__file__).parents[1]
HEAD = f"""# What goes wrong with hooks

Each row is a case that was run with each tool, in its own process. The result is compared with a value that was
computed in another way.

- *{RIGHT}*: the correct value, or the correct state.
- *loud*: an error or a warning, with its name.
- {WRONG}: a wrong answer and no message.
- {CANNOT}: the tool has no way to express this.

*Raw hooks* are PyTorch's own, as most people write them. *Baukit-style* is the small tracer of forward hooks that is
common in interpretability code. The other libraries are used as their documentation shows; for TransformerLens a hook
point is put behind the module. `make hazards` writes this page.
"""
Verdicts = dict[str, dict[str, str]]


def main() -> int:
    """Judge every tool, print the counts and write the page."""
    parser = argparse.ArgumentParser(prog="python -m hazards", description="What goes wrong with hooks, by tool.")
    parser.add_argument("tool", nargs="*", help=f"of: {', '.join([*TOOLS, *PACKAGES])} (all, and then write the page)")
    options = parser.parse_args()
    found: Verdicts = {}
    for name in options.tool or [*TOOLS, *PACKAGES]:
        print(f"{name} …", flush=True)
        version, verdicts = judged(name)
        found[f"{name} {version}".strip()] = verdicts
        print("  " + ", ".join(f"{count} {kind}" for kind, count in kinds(verdicts).items()), flush=True)
    if not options.tool:
        (ROOT / "docs" / "hazards.md").write_text(page(found), encoding="utf-8")
    else:
        print(page(found))
    broken = any(BROKEN in verdicts.values() for verdicts in found.values())
    return 1 if broken or WRONG in found.get("tenterhook", {}).values() else 0


def judged(name: str) -> tuple[str, dict[str, str]]:
    """Return the version of a tool, and its verdict for each case."""
    python = environment(*PACKAGES[name]) if name in PACKAGES else Path(sys.executable)
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    sources = [str(ROOT), *([] if name in PACKAGES else [str(ROOT / "src")])]
    quiet["PYTHONPATH"] = os.pathsep.join(sources)
    command = [str(python), "-m", "hazards.apart", name]
    done = subprocess.run(command, check=True, cwd=ROOT, env=quiet, stdout=subprocess.PIPE, text=True)
    first, *lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return first["version"], {line["case"]: line["verdict"] for line in lines}


def kinds(verdicts: dict[str, str]) -> Counter[str]:
    """Return the number of verdicts of each kind."""
    return Counter(verdict.split(" (")[0].strip("*") for verdict in verdicts.values())


def page(found: Verdicts) -> str:
    """Return the text of the page."""
    lines = [HEAD, "## Totals", "", "| tool | right | loud | silently wrong | cannot express |"]
    lines.append("|---|--:|--:|--:|--:|")
    for name, verdicts in found.items():
        counts = kinds(verdicts)
        numbers = (counts[kind] for kind in (RIGHT, "loud", "silently wrong", CANNOT))
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    for section, cases in itertools.groupby(CASES, key=lambda case: case.section):
        lines += ["", f"## {section}", "", f"| case | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
        for case in cases:
            verdicts = (each[case.sentence] for each in found.values())
            lines.append(f"| {case.sentence} | {' | '.join(verdicts)} |")
    lines += ["", "## Tested elsewhere", "", "The tests of tenterhook cover these.", ""]
    lines += ["| | hazard | tests |", "|---|---|---|"]
    for section, sentence, tests in ELSEWHERE:
        lines.append(f"| {section} | {sentence} | {'<br>'.join(f'`{test}`' for test in tests)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
