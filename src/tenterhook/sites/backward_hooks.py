"""The backward hooks of a module: where they are stored, and how a call of the module finds them.

Two forward hooks with our own key are in the module's dicts of hooks. The pre-hook is last, so it sees the arguments
that ``forward`` gets. The forward hook is last, so it sees the output that the caller gets.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from tenterhook.pytorch.module_calls import forward_pre_hooks_of, hook_tables_of
from tenterhook.sites.call_gradients import CallGradients
from tenterhook.sites.run_hook import Hook, name_of
from tenterhook.sites.threads import current

__all__ = ["KEY", "BackwardHooks", "backward_hooks", "name_of", "put_last"]

KEY = "tenterhook-backward"
STALE = 32  # With more running calls in one thread than this, look for calls that an exception ended.


class BackwardHooks:
    """The backward hooks of one module. They stay in the module's dicts of hooks as long as there is at least one."""

    def __init__(self) -> None:
        self.before: OrderedDict[int, Hook] = OrderedDict()
        self.after: OrderedDict[int, Hook] = OrderedDict()
        # The running calls of each thread; the innermost is last.
        self._running: dict[int, list[CallGradients]] = {}

    def add(self, which: str, key: int, hook: Hook, *, prepend: bool) -> None:
        """Add a hook that is called ``before`` or ``after`` the backward pass of the module."""
        line: OrderedDict[int, Hook] = getattr(self, which)
        line[key] = hook
        if prepend:
            line.move_to_end(key, last=False)

    def discard(self, module: nn.Module, which: str, key: int) -> None:
        """Remove a hook. With the last one, remove our hooks from the module."""
        getattr(self, which).pop(key, None)
        if not self.before and not self.after:
            for table in hook_tables_of(module):
                table.pop(KEY, None)

    def install(self, module: nn.Module) -> None:
        """Add the two forward hooks that see a call of the module."""
        pre_hooks, pre_kwargs, hooks, hooks_kwargs, always = hook_tables_of(module)
        pre_hooks[KEY], hooks[KEY] = self.way_in, self.way_out
        # The forward hook also runs after an exception, to remove the call.
        pre_kwargs[KEY] = hooks_kwargs[KEY] = always[KEY] = True

    def way_in(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Give the module aliases of its inputs. A ``__call__`` in the style of PyTorch 1 passes no keywords."""
        call = CallGradients(module, tuple(self.before.values()), tuple(self.after.values()))
        running = self._running.setdefault(current.token, [])
        if len(running) > STALE:
            running[:] = [each for each in running if not each.is_over]
        running.append(call)
        call.is_last = next(reversed(forward_pre_hooks_of(module))) == KEY
        # PyTorch reads the dict of forward hooks after the forward, so our hook is still the last one in it.
        put_last(hook_tables_of(module)[2])
        if not torch.is_grad_enabled():
            return None
        new = call.enter(args, kwargs or {})
        return new if new is None or kwargs is not None else new[0]

    def way_out(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Give the caller aliases of the outputs. ``rest`` is the keyword arguments, if passed, and the output."""
        kwargs, output = rest if len(rest) > 1 else ({}, rest[0])
        put_last(forward_pre_hooks_of(module))  # For the next call: a pre-hook may have been registered since.
        running = self._running.get(current.token)
        if not running:  # The hook was registered while the call was running.
            return None
        given, depth = (args, kwargs), len(running) - 1
        if depth:
            depth = next((n for n in range(depth, -1, -1) if running[n].got(given)), depth)
        call = running[depth]
        del running[depth:]  # Calls inside this one that are still in the list were ended by an exception.
        if not running:
            del self._running[current.token]
        new = call.leave(given, output)
        return new if torch.is_grad_enabled() else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the hooks without the running calls: a copy of the module has its own calls."""
        return {"before": OrderedDict(self.before), "after": OrderedDict(self.after), "_running": {}}


def backward_hooks(module: nn.Module) -> BackwardHooks:
    """Return the module's backward hooks; install them if it has none."""
    way_in: Any = forward_pre_hooks_of(module).get(KEY)
    if way_in is not None:
        return way_in.__self__  # type: ignore[no-any-return]
    manager = BackwardHooks()
    manager.install(module)
    return manager


def put_last(table: Any) -> None:
    """Move our hook to the end of one of PyTorch's dicts of hooks, if it is there."""
    if KEY in table and next(reversed(table)) != KEY:
        table.move_to_end(KEY)
