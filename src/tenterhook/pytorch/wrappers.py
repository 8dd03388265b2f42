"""Modules that only wrap another one: ``torch.compile``, data parallelism, FSDP, checkpointing, peft.

A wrapper is recognised by its class, never by an attribute name: a model may have a child of its own with the name
``module``. The class is looked up only in modules that are already imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from tenterhook.pytorch.dynamo import ORIGINAL_MODULE
from tenterhook.pytorch.module_calls import children_of
from tenterhook.pytorch.names import attribute

__all__ = [
    "WRAPPED_NAMES",
    "has_wrapped_name",
    "name_of_wrapper",
    "unwrapped",
    "wrapped_module",
    "wrapped_name",
    "wrappers_of",
]

_FSDP = attribute("FullyShardedDataParallel", "_fsdp_wrapped_module")
_CHECKPOINT = attribute("ActivationWrapper", "_checkpoint_wrapped_module")
_CHECKPOINTS = "torch.distributed.algorithms." + attribute("torch.distributed.algorithms", "_checkpoint")

# The Python module of a class, the class, the attribute with the wrapped module, and the name for users.
WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", ORIGINAL_MODULE, "torch.compile"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module", "DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module", "DataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", _FSDP, "FSDP"),
    (f"{_CHECKPOINTS}.checkpoint_wrapper", "ActivationWrapper", _CHECKPOINT, "checkpoint"),
    ("torch.optim.swa_utils", "AveragedModel", "module", "AveragedModel"),
    ("peft.peft_model", "PeftModel", "base_model", "peft"),
    ("peft.mixed_model", "PeftMixedModel", "base_model", "peft"),
    ("peft.tuners.tuners_utils", "BaseTuner", "model", "peft"),
    ("tenterhook.splice.spliced_module", "SplicedModule", "spliced", "th.splice"),
)
WRAPPED_NAMES = frozenset(name for _, _, name, _ in WRAPPERS)
"""the names of the wrapped module in each wrapper; a module without such a child is not a wrapper"""


def has_wrapped_name(children: Any) -> bool:
    """Return whether a table of children has a name that a wrapper gives to the wrapped module."""
    if type(children) is dict:
        return not children.keys().isdisjoint(WRAPPED_NAMES)  # Reads the shorter of the two.
    return not WRAPPED_NAMES.isdisjoint(children.keys())  # The table of a ScriptModule has a list of keys.


def wrapped_name(module: nn.Module) -> str | None:
    """Return the name of the child that a wrapper wraps, or None if the module is not a wrapper."""
    found = _kind(module)
    return found[0] if found is not None else None


def wrapped_module(wrapper: nn.Module) -> nn.Module:
    """Return the module that a wrapper wraps, or the module itself if it is not a wrapper."""
    name = wrapped_name(wrapper)
    found = children_of(wrapper)[name] if name is not None else None
    return wrapper if found is None else found


def name_of_wrapper(module: nn.Module) -> str:
    """Return the usual name of a wrapper: ``torch.compile``, ``DistributedDataParallel``."""
    found = _kind(module)
    return found[1] if found is not None else type(module).__name__


def _kind(module: nn.Module) -> tuple[str, str] | None:
    children = children_of(module)
    if not has_wrapped_name(children):
        return None
    for place, name, child, called in WRAPPERS:
        if child in children and children[child] is not None:
            cls: Any = getattr(sys.modules.get(place), name, None)
            if cls is not None and isinstance(module, cls):
                return child, called
    return None


def wrappers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the wrappers around a module, outermost first. Yield nothing if the module is not a wrapper."""
    seen = set[int]()
    while wrapped_name(module) is not None and id(module) not in seen:
        seen.add(id(module))
        yield module
        module = wrapped_module(module)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers around it, or the module itself.

    >>> plain = nn.Linear(2, 2)
    >>> unwrapped(nn.DataParallel(nn.DataParallel(plain))) is plain
    True
    """
    children = children_of(module)
    if type(children) is dict and children.keys().isdisjoint(WRAPPED_NAMES):  # As for most modules.
        return module
    for wrapper in wrappers_of(module):
        module = wrapped_module(wrapper)
    return module
