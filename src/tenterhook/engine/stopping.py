"""Other libraries' clean-up when a run is stopped.

``Stopped`` is no ``Exception``, and PyTorch runs hooks that were registered with ``always_call=True`` only for an
``Exception``. They are run here instead, from the innermost module outwards, before the stop is raised. So is the hook
by which FSDP2 spreads a module's parameters over the processes again, which PyTorch runs for no exception at all.
"""

from __future__ import annotations

import warnings
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from tenterhook.errors import TenterhookWarning

__all__ = ["run_clean_up"]

_INNER: set[CodeType] = {c for c in nn.Module._call_impl.__code__.co_consts if isinstance(c, CodeType)}


def run_clean_up(frame: FrameType | None) -> None:
    """Run the ``always_call`` hooks of the modules that are being called, as PyTorch does for an exception."""
    while frame is not None:
        if frame.f_code in _INNER:
            _clean_up_one(frame.f_locals)
            _shard_again(frame.f_locals)
        frame = frame.f_back


def _clean_up_one(call: dict[str, Any]) -> None:
    module, done = call["self"], call["called_always_called_hooks"]
    everywhere = torch_module._global_forward_hooks
    for key in torch_module._global_forward_hooks_always_called:
        if key in everywhere and key not in done:
            _run(everywhere[key], module, (call["args"], call["result"]))
    for key in module._forward_hooks_always_called:
        if key in module._forward_hooks and key not in done:
            named = key in module._forward_hooks_with_kwargs
            rest = (call["args"], call["kwargs"], call["result"]) if named else (call["args"], call["result"])
            _run(module._forward_hooks[key], module, rest)


def _shard_again(call: dict[str, Any]) -> None:
    """End the call for FSDP2 as if it had returned nothing, unless that was done already."""
    module = call["self"]
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    if state is not None and state._training_state.name == "FORWARD":
        _run(state._post_forward, module, (call["args"], None))


def _run(hook: Any, module: nn.Module, rest: tuple[Any, ...]) -> None:
    try:
        hook(module, *rest)
    except Exception as error:  # noqa: BLE001  PyTorch silences these likewise: the way out must not be cut off.
        warnings.warn(
            f"a forward hook with always_call=True of {type(module).__name__} failed during a stop: {error!r}",
            TenterhookWarning,
            stacklevel=2,
        )
