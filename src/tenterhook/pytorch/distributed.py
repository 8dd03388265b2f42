"""FSDP2 and pipelines: the processes that share parameters, calls that must be ended, stages that others wait for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn

from tenterhook.pytorch.names import attribute
from tenterhook.pytorch.python_code import frames_from

__all__ = ["end_of_fsdp_forward", "fsdp_meshes", "in_pipeline"]

_STATE = attribute("FSDPModule", "_get_fsdp_state")
_GROUPS = attribute("FSDPState", "_fsdp_param_groups")  # In later releases, several groups for a module.
_GROUP = attribute("FSDPState", "_fsdp_param_group")
attribute("FSDPState", "_training_state")
attribute("FSDPState", "_post_forward")


def _fsdp_state(module: nn.Module) -> Any:
    return getattr(module, _STATE)() if hasattr(module, _STATE) else None


def fsdp_meshes(module: nn.Module) -> Iterator[Any]:
    """Yield the device meshes over which FSDP2 spreads the parameters of a module."""
    state = _fsdp_state(module)
    if state is not None:
        groups = getattr(state, _GROUPS, None) or [getattr(state, _GROUP)]
        yield from (group.mesh_info.mesh for group in groups if group is not None)


def end_of_fsdp_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the hook by which FSDP2 ends the call of a module that is under way; None where there is nothing to end.

    PyTorch runs it for no exception at all.
    """
    state = _fsdp_state(module)
    return state._post_forward if state is not None and state._training_state.name == "FORWARD" else None


def in_pipeline(frame: FrameType | None) -> bool:
    """Return whether a frame was called by a stage of a pipeline, whose neighbours wait for what it sends."""
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    return stage is not None and any(each.f_globals is vars(stage) for each in frames_from(frame))
