"""FSDP2 and pipelines: device meshes, the end of an FSDP2 call, and pipeline stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn

from tenterhook.pytorch.names import Absent, attribute
from tenterhook.pytorch.python_code import frames_from

__all__ = ["end_of_fsdp_forward", "fsdp_meshes", "in_pipeline", "is_fsdp", "require_fsdp"]

_STATE = attribute("FSDPModule", "_get_fsdp_state")
_GROUPS = attribute("FSDPState", "_fsdp_param_groups")  # Later releases have several groups for a module.
_GROUP = attribute("FSDPState", "_fsdp_param_group")
_MESH_INFO = attribute("FSDPParamGroup", "mesh_info")
_MESH = attribute("FSDPParamGroup", "mesh")
_TRAINING_STATE = attribute("FSDPState", "_training_state")
_POST_FORWARD = attribute("FSDPState", "_post_forward")
_IN_FORWARD = "FORWARD"


def is_fsdp(module: nn.Module) -> bool:
    """Return whether FSDP2 shards the parameters of a module."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _fsdp_state(module: nn.Module) -> Any:
    """Return the FSDP2 state of a module, or None."""
    return _part(module, _STATE)() if is_fsdp(module) else None


def _part(owner: Any, *names: str) -> Any:
    """Return the first of these attributes that exists. Raise if none exists."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    return Absent(f"{type(owner).__name__}.{names[-1]}")()


def fsdp_meshes(module: nn.Module) -> Iterator[Any]:
    """Yield the device meshes over which FSDP2 shards the parameters of a module."""
    state = _fsdp_state(module)
    if state is not None:
        found = _part(state, _GROUPS, _GROUP)
        groups = found if isinstance(found, list) else [found]
        yield from (_part(_part(group, _MESH_INFO), _MESH) for group in groups if group is not None)


def end_of_fsdp_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the hook with which FSDP2 ends the running call of a module, or None if there is no such call.

    PyTorch does not run this hook when the call raises an exception.
    """
    state = _fsdp_state(module)
    return (
        _part(state, _POST_FORWARD) if state is not None and _part(state, _TRAINING_STATE).name == _IN_FORWARD else None
    )


def require_fsdp(model: nn.Module) -> None:
    """Raise ``UnsupportedTorch`` if a model uses FSDP2 and its calls cannot be ended."""
    modules = model.modules() if "torch.distributed.fsdp" in sys.modules else ()
    for module in modules:
        state = _fsdp_state(module)
        if state is not None:
            _part(state, _POST_FORWARD)
            _part(type(_part(state, _TRAINING_STATE)), _IN_FORWARD)


def in_pipeline(frame: FrameType | None) -> bool:
    """Return whether a pipeline stage called a frame. The neighbouring stages wait for what this stage sends."""
    package = "torch.distributed.pipelining"
    names = (each.f_globals.get("__name__", "") for each in frames_from(frame)) if package in sys.modules else ()
    return any(str(name).startswith(package) for name in names)
