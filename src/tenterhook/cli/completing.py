"""What the shell completes: a MODEL, by the files here and by the names in them; nothing is run for it."""

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
    """Bash takes a colon for the end of a word, and a model has one in it: so words are read from the line itself."""

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
        """What Bash puts in place of the last word, which for it begins after the colon."""
        before = getattr(self, "before", "") if ":" in os.environ.get("COMP_WORDBREAKS", "") else ""
        return f"{item.type},{str(item.value).removeprefix(before)}"


add_completion_class(_Bash, "bash")


def complete_model(_context: Any, _parameter: Any, incomplete: str) -> list[CompletionItem]:
    """The prefixes of model libraries, the files and directories here, and after ``file.py:`` what is in the file."""
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
