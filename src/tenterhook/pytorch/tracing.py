"""Calls that only trace a model: ``torch.export``, ``torch.fx``, ``torch.jit.trace`` and ``make_fx``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.compiler
import torch.fx

from tenterhook.pytorch.module_calls import ProbeModule
from tenterhook.pytorch.names import attribute, find, is_absent, later
from tenterhook.pytorch.support import check, feature, require

__all__ = [
    "is_exporting",
    "name_of_tracer",
]

attribute("torch.compiler", "_is_exporting_flag")
_fx_flag: Any = find("torch.fx._symbolic_trace._get_is_fx_tracing")  # From 2.14 on; a module variable before.
_fx: Any = find("torch.fx._symbolic_trace")
_dispatch_modes: Callable[[], int] = find("torch._C._len_torch_dispatch_stack")
_dispatch_mode: Callable[[Any], Any] = find("torch._C._get_dispatch_mode")
_PROXY: Any = find("torch._C._TorchDispatchModeKey.PROXY")
_LOADED_BY_MAKE_FX = "torch._inductor"
later(_LOADED_BY_MAKE_FX)
_jit_state: Callable[[], Any] = find("torch._C._get_tracing_state", torch.jit.is_tracing)  # type: ignore[attr-defined]

attribute("torch.fx._symbolic_trace", "_is_fx_tracing_flag")
if is_absent(_fx_flag) and hasattr(_fx, "_is_fx_tracing_flag"):

    def _is_fx_tracing() -> bool:
        return _fx._is_fx_tracing_flag  # type: ignore[no-any-return]
else:
    _is_fx_tracing = _fx_flag


def is_exporting() -> bool:
    """Return whether ``torch.export`` is tracing. Dynamo can inline this function."""
    return torch.compiler._is_exporting_flag


if not hasattr(torch.compiler, "_is_exporting_flag"):
    is_exporting = torch.compiler.is_exporting


def name_of_tracer() -> str | None:
    """Return the name of the tracer that traces this call, or None for a normal call."""
    if is_exporting():
        return "torch.export"
    if _is_fx_tracing():
        return "torch.fx"
    if _jit_state():
        return "torch.jit.trace"
    if _dispatch_modes():
        if _LOADED_BY_MAKE_FX in sys.modules:
            require("make_fx")
        return _make_fx()
    return None


def _make_fx() -> str | None:
    return None if _dispatch_mode(_PROXY) is None else "make_fx"


class _Asks(ProbeModule):
    def __init__(self, ask: Callable[[], str | None]) -> None:
        super().__init__()
        self.ask = ask
        self.seen: list[str | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.ask())
        return x * 2


@feature("tracing", used_by="every session", still_works="nothing that opens a session")
def probe_tracing() -> str | None:
    """Check that traced calls are distinguished from normal calls."""
    module, x = _Asks(name_of_tracer), torch.ones(2, device="cpu")
    module(x)
    check(module.seen == [None], "a plain call looks traced")
    torch.fx.symbolic_trace(module)
    check(module.seen[-1] == "torch.fx", "torch.fx is not detected")
    module(x)
    check(module.seen[-1] is None, "a plain call looks traced after tracing")
    check(not is_absent(_PROXY) and not _dispatch_modes() and _dispatch_mode(_PROXY) is None, "make_fx has changed")
    return None


@feature(
    "make_fx",
    used_by="a session in a process in which make_fx or torch.export was used",
    still_works="the same session in a process of its own",
)
def probe_make_fx() -> str | None:
    """Check that a call traced by ``make_fx`` is distinguished from a normal call.

    This imports a part of the compiler.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    module, x = _Asks(_make_fx), torch.ones(2, device="cpu")
    make_fx(module)(x)
    check(module.seen == ["make_fx"], "make_fx is not detected")
    module(x)
    check(module.seen[-1] is None, "a plain call looks traced after make_fx")
    return None
