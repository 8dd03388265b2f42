"""Hooks that must run when a stop leaves a call: PyTorch's ``always_call`` hooks, and the hook of FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from tenterhook.pytorch.distributed import end_of_fsdp_forward
from tenterhook.pytorch.module_calls import GLOBAL_FORWARD_HOOKS, Calls, ProbeModule, call_state, forward_hooks_of
from tenterhook.pytorch.names import attribute, find
from tenterhook.pytorch.python_code import frames_from, own_frame
from tenterhook.pytorch.support import check, feature

__all__ = [
    "hooks_to_run_on_exit",
]

_GLOBAL_ALWAYS_CALLED: dict[Any, Any] = find("torch.nn.modules.module._global_forward_hooks_always_called", {})
_ALWAYS_CALLED = attribute("nn.Module", "_forward_hooks_always_called")
_WITH_KWARGS = attribute("nn.Module", "_forward_hooks_with_kwargs")

PendingHook = tuple[nn.Module, Callable[..., Any], tuple[Any, ...]]
"""a module, a hook, and its arguments after the module"""


def hooks_to_run_on_exit(frame: FrameType | None) -> Iterator[PendingHook]:
    """Yield the hooks of the calls around a frame that run even if a call fails, innermost call first."""
    for each in frames_from(frame):
        call = call_state(each)
        if call is not None:
            yield from _always_called(call)
            ends = end_of_fsdp_forward(call["self"])
            if ends is not None:
                yield call["self"], ends, (call["args"], None)


def _always_called(call: dict[str, Any]) -> Iterator[PendingHook]:
    module, done = call["self"], call["called_always_called_hooks"]
    for key in _GLOBAL_ALWAYS_CALLED:
        if key in GLOBAL_FORWARD_HOOKS and key not in done:
            yield module, GLOBAL_FORWARD_HOOKS[key], (call["args"], call["result"])
    hooks = forward_hooks_of(module)
    for key in getattr(module, _ALWAYS_CALLED):
        if key in hooks and key not in done:
            named = key in getattr(module, _WITH_KWARGS)
            rest = (call["args"], call["kwargs"], call["result"]) if named else (call["args"], call["result"])
            yield module, hooks[key], rest


class _Stops(ProbeModule):
    def forward(self, found: list[Any]) -> list[Any]:
        found.extend((hook, rest) for _, hook, rest in hooks_to_run_on_exit(own_frame(1)))
        return found


@feature(
    "stopping a run",
    used_by="a session with stop=True, on a model with hooks that always run",
    still_works="the same session without stop=True",
)
def probe_stop() -> str | None:
    """Check that the ``always_call`` hooks of running calls are found."""
    inner = _Stops()
    module = Calls(inner)

    def hook(*_: Any) -> None:
        """Do nothing."""

    inner.register_forward_hook(hook, always_call=True)
    inner.register_forward_hook(hook, always_call=True, with_kwargs=True)
    found: list[Any] = []
    module(found)
    seen = [(each, len(rest)) for each, rest in found if each is hook]  # Users may have registered global hooks too.
    check(seen == [(hook, 2), (hook, 3)], "hooks with always_call=True cannot be found during a call")
    handle = torch_module.register_module_forward_hook(hook, always_call=True)
    known = handle.id in _GLOBAL_ALWAYS_CALLED
    handle.remove()
    check(known, "global hooks with always_call=True are stored elsewhere")
    return None
