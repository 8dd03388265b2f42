"""Shell completion of the MODEL argument, from file names and the names defined in Python files. No user code runs."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

__all__ = ["complete_model"]

HEADS = ("transformers:", "timm:")
WORDS = "COMP_CWORD=$COMP_CWORD"
LINE = 'COMP_LINE="${COMP_LINE:0:$COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS"'


class _Bash(BashComplete):
    """Completion for Bash that splits the command line itself.

    Bash ends a word at a colon, and a MODEL contains one.
    """

    source_template = BashComplete.source_template.replace(WORDS, f"{WORDS} {LINE}")

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ.get("COMP_LINE")
        if line is None:
            return super().get_completion_args()
        words = split_arg_string(line)
        incomplete = words.pop() if words and not line[-1:].isspace() else ""
        self.before = incomplete.rpartition(":")[0] + ":" if ":" in incomplete else ""
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """Return the text that replaces the last word. For Bash, that word begins after the colon."""
        before = getattr(self, "before", "") if ":" in os.environ.get("COMP_WORDBREAKS", "") else ""
        return f"{item.type},{str(item.value).removeprefix(before)}"


add_completion_class(_Bash, "bash")


def complete_model(_context: Any, _parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Return the completions of a MODEL.

    These are the prefixes of model libraries, Python files and directories, and after ``file.py:`` the names that the
    file defines.
    """
    file, colon, _ = incomplete.partition(":")
    if colon and file.endswith(".py"):
        return [CompletionItem(name) for name in _names(Path(file)) if name.startswith(incomplete)]
    heads = [CompletionItem(head) for head in HEADS if head.startswith(incomplete)]
    base = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    if not base.is_dir():
        return heads
    found = sorted(path for path in base.iterdir() if path.suffix == ".py" or path.is_dir())
    names = [f"{path}:" if path.suffix == ".py" else str(path) for path in found if not path.name.startswith(".")]
    return heads + [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _names(file: Path) -> list[str]:
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    defined = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    defined += [target.id for target in targets if isinstance(target, ast.Name)]
    return [f"{file}:{name}" for name in defined if not name.startswith("_")]
