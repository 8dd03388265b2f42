"""The source lines that run an operation."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from tenterhook._text import printable
from tenterhook.pytorch.python_code import first_argument, frames_from

__all__ = ["ForwardLines", "SourceLine", "user_line"]

PYTORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source: its file, its number, and the function around it."""

    file: str
    number: int
    function: str

    @property
    def source(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return printable(f"{Path(self.file).name}:{self.number} {self.source}".rstrip())


def user_line(frame: FrameType | None) -> SourceLine | None:
    """Return the innermost line of the model's code that runs now.

    A line of PyTorch is returned only if there is no other, as in an ``nn.Sequential`` of PyTorch's layers.
    """
    inside = None
    for each in frames_from(frame):
        file = each.f_code.co_filename
        if file.startswith(OURS):
            if inside is not None:
                break
        elif not file.startswith((PYTORCH, "<frozen")):
            return _line(each)
        else:
            inside = inside or each
    return None if inside is None else _line(inside)


class ForwardLines:
    """The lines of some forwards that run now. A line includes the calls that it makes."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._paths = {id(module): path for path, module in modules}
        self._codes = {_forward_code(module) for _, module in modules}

    def __bool__(self) -> bool:
        """Return whether the lines of any forward are asked for."""
        return bool(self._paths)

    def now(self, frame: FrameType | None) -> tuple[tuple[str, SourceLine], ...]:
        """Return the address and the running line of each of the forwards that is running."""
        found = []
        for each in frames_from(frame):
            if each.f_code in self._codes:
                path = self._paths.get(id(first_argument(each)))
                if path is not None:
                    found.append((path, _line(each)))
        return tuple(found)


def _forward_code(module: nn.Module) -> CodeType | None:
    """Return the code of a module's ``forward``, below its decorators."""
    forward: Any = inspect.unwrap(vars(module).get("forward", type(module).forward))
    return getattr(getattr(forward, "__func__", forward), "__code__", None)


def _line(frame: FrameType) -> SourceLine:
    return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
