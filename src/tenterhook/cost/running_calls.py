"""The calls of modules that are running while a pass is measured."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from torch import nn

from tenterhook.address.walk import walk
from tenterhook.cost.source_lines import SourceLine
from tenterhook.errors import UnsupportedModel
from tenterhook.pytorch.autograd import current_backward_id
from tenterhook.sites.module import can_be_called

__all__ = ["NOWHERE", "Path", "RunningCalls", "Where", "joined"]

Path = tuple[str, ...]
"""The addresses of nested calls, outermost first. The model's own address is ''."""


class Where(NamedTuple):
    """The place of an operation: the running calls, and the lines of the forwards whose lines are asked for."""

    path: Path
    lines: tuple[tuple[str, SourceLine], ...] = ()


NOWHERE = Where(())
Listener = Callable[[str, Any], None]

OTHER_THREAD = (
    "{path!r} was called in another thread, whose operations are not counted. Call th.cost on the inner module of "
    "nn.DataParallel, or on a model that runs in one thread."
)


def joined(outer: Path, inner: Path) -> Path:
    """Return the calls of a recomputation below those that it was called from.

    >>> joined(("", "h.3", "h.3.mlp"), ("h.3", "h.3.attn"))
    ('', 'h.3', 'h.3.attn')
    """
    return (*outer[: outer.index(inner[0])], *inner) if inner[0] in outer else (*outer, *inner)


class RunningCalls:
    """A context in which every call of a module is noted, with PyTorch's own hooks. It removes them at the end.

    A call that raises is noted too, so calls that activation checkpointing stops early do not stay.
    """

    def __init__(self, model: nn.Module, entered: Listener, left: Listener) -> None:
        self._modules = [(path, module) for path, module in walk(model)[0] if can_be_called(module)]
        self._entered, self._left = entered, left
        self._handles: list[Any] = []
        self._passes: list[int] = []
        self._thread = threading.get_ident()
        # By id, because an error keeps the tensors of its frames alive.
        self._failed: dict[int, str] = {}
        self.path: Path = ()

    @property
    def in_this_pass(self) -> bool:
        """True if the innermost call began in the backward pass that runs now: a recomputation."""
        return bool(self._passes) and self._passes[-1] == current_backward_id()

    def failed_in(self, error: BaseException) -> str:
        """Return the address of the innermost call that raised an error, or '' if none did."""
        return self._failed.get(id(error), "")

    def __enter__(self) -> Self:
        try:
            for path, module in self._modules:
                self._handles += [
                    module.register_forward_pre_hook(self._enter_hook(path), prepend=True, with_kwargs=True),
                    module.register_forward_hook(self._leave_hook(path), always_call=True),
                ]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._passes, self.path = [], [], ()

    def _enter_hook(self, path: str) -> Callable[..., None]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            running = current_backward_id()
            if running == -1 and threading.get_ident() != self._thread:
                raise UnsupportedModel(OTHER_THREAD.format(path=path))
            self._failed.clear()  # The model has caught earlier errors.
            self._passes.append(running)
            self.path = (*self.path, path)
            self._entered(path, (args, kwargs))

        return enter

    def _leave_hook(self, path: str) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            while self.path and self.path[-1] != path:
                self._pop()
            error = sys.exc_info()[1]
            if error is not None:
                self._failed.setdefault(id(error), path)
            if self.path:
                self._left(path, output)
                self._pop()

        return leave

    def _pop(self) -> None:
        self.path = self.path[:-1]
        self._passes.pop()
