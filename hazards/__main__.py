"""Run every case with every tool, and write the table: ``python -m hazards``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from hazards.cases import CASES
from hazards.tools import TOOLS, Tool, Unable

__all__ = ["judge", "main"]

HEAD = """# What goes wrong with hooks

Each row is a case that was run with each tool, and judged against a value that was computed in another way. *Refuses*
means that the tool raised an error: loud, and nobody is misled. **Silently wrong** means that it gave a wrong answer
without a word. The *usual tracer* is the forward hook in a class that many projects carry around.

`make hazards` makes this table anew.
"""


def judge(tool: Tool, case: object) -> str:
    """What one tool does in one case."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right = case(tool)  # type: ignore[operator]
    except Unable:
        return "–"
    except Exception as error:  # noqa: BLE001  Whatever a tool raises is its answer.
        return f"refuses ({type(error).__name__})"
    return "right" if right else "**silently wrong**"


def main() -> int:
    """Judge, print and write."""
    lines, section = [HEAD], ""
    names = list(TOOLS)
    bad = 0
    for heading, sentence, case in CASES:
        if heading != section:
            lines += ["", f"## {heading}", "", f"| case | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
            section = heading
        verdicts = [judge(TOOLS[name], case) for name in names]
        bad += "wrong" in verdicts[names.index("tenterhook")]
        lines.append(f"| {sentence} | {' | '.join(verdicts)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    Path("docs/hazards.md").write_text(text, encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
