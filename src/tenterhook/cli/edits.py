"""Parsers for ``--edit`` (``h.5=zero()``) and ``--edits`` (files that ``th.save_edits`` wrote)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from tenterhook.address import Selector
from tenterhook.cli.errors import CommandError, speaking
from tenterhook.cli.inputs import READERS
from tenterhook.edit.saved import READY, load_edits

__all__ = ["edits_of_files", "read_edits"]

TEXT = re.compile(rf"(?P<selector>.+?)=(?P<edit>(?:{'|'.join(READY)})\b.*)", re.DOTALL)
FORM = "An edit is SELECTOR=EDIT, for example --edit 'h.5=zero()' or --edit 'h.7.mlp=scale(2, at=at[:, -1])'"

UNREADABLE = (ValueError, TypeError, MemoryError, RecursionError)
"""errors of ``ast.literal_eval`` for an expression that is not a literal"""


def read_edits(texts: tuple[str, ...]) -> dict[Selector, Any]:
    """Parse the ``--edit`` options into the changes that ``th.edit`` takes.

    An edit may only contain constants, lists, ``at[...]`` and file names. No code is evaluated.
    """
    changes: dict[Selector, Any] = {}
    for text in texts:
        found = TEXT.fullmatch(text)
        if found is None:
            raise CommandError(f"{text!r} is not an edit.\n{FORM}\nThe edits are {', '.join(sorted(READY))}.")
        changes.setdefault(found["selector"], []).append(_edit(found["edit"]))
    return changes


def edits_of_files(files: Iterable[Path], model: nn.Module) -> dict[Selector, Any]:
    """Load edit files in the given order, with the device and dtype of the model."""
    like = next((each for each in model.parameters() if each.is_floating_point()), None)
    device, dtype = (None, None) if like is None else (like.device, like.dtype)
    changes: dict[Selector, Any] = {}
    for file in files:
        for address, edits in load_edits(file, device=device, dtype=dtype).items():
            changes.setdefault(address, []).extend(edits if isinstance(edits, list) else [edits])
    return changes


def _edit(text: str) -> Any:
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        why = error.msg if isinstance(error, SyntaxError) else error
        raise CommandError(f"{text!r:.200} cannot be read: {why}.\n{FORM}") from None
    call = ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in READY:
        raise CommandError(f"{text!r} is not an edit.\n{FORM}\nThe edits are {', '.join(sorted(READY))}.")
    args = [_value(argument, text) for argument in call.args]
    kwargs = {str(word.arg): _value(word.value, text) for word in call.keywords}
    with speaking(f"{text} could not be created", debug=False):
        return READY[call.func.id](*args, **kwargs)


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "at":
        return _index(node.slice)
    try:
        value = ast.literal_eval(node)
    except UNREADABLE:
        raise CommandError(
            f"{ast.unparse(node)!r} in {text!r}: an edit takes numbers, at[...] and file names."
        ) from None
    if isinstance(value, str) and Path(value).suffix in READERS:
        with speaking(f"{value} could not be read"):
            return READERS[Path(value).suffix](Path(value))
    return value


def _index(node: ast.expr) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(_index(part) for part in node.elts)
    try:
        if isinstance(node, ast.Slice):
            ends = (node.lower, node.upper, node.step)
            return slice(*(None if part is None else ast.literal_eval(part) for part in ends))
        return ast.literal_eval(node)
    except UNREADABLE:
        raise CommandError(
            f"at[{ast.unparse(node)}]: an index consists of numbers, slices and lists of numbers."
        ) from None
