"""The state on which a call's result depends besides its arguments: contents of modules, and global modes."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.call_trace.object_contents import STANDS, USUAL, Contents, own_forward, same
from tenterhook.engine.runs import GENERATE
from tenterhook.pytorch.modes import any_mode
from tenterhook.pytorch.module_calls import (
    GLOBAL_FORWARD_HOOKS,
    GLOBAL_FORWARD_PRE_HOOKS,
    OWN_CONTENT,
    buffers_of,
    children_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    parameters_of,
)
from tenterhook.pytorch.transforms import in_transform

__all__ = [
    "OTHER_STATE",
    "ModuleState",
    "SubtreeState",
    "ambient",
    "in_the_way",
]

OTHER_STATE = "the state of a module in it differs from the recorded run"
FIXED = frozenset({type(None), bool, int, float, str, bytes})
BOXES = (list, tuple, set, frozenset, deque, dict)
MANY = 256  # Containers with more items are only compared once per run.

_values_of = dict.values


class ModuleState:
    """The contents of one module: parameters, buffers, children, attributes, and the items of its own containers.

    They are compared by identity, constants by value, and tensors by their version. :class:`Dependencies` compares
    objects at deeper levels, once per run.
    """

    __slots__ = (
        "_boxes",
        "_forward",
        "contents",
        "kind",
        "known",
        "module",
        "parameters",
        "tables",
        "tensors",
        "watched",
    )

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kind = module, (type(module), getattr(type(module), "forward", None))
        state = module.__dict__
        # The state of a scripted module cannot be read.
        self.known = not isinstance(module, torch.jit.ScriptModule) and all(name in state for name in OWN_CONTENT)
        self.tensors: list[Tensor] = []
        if not self.known:
            return
        self._forward = own_forward(module)
        self.parameters: Contents = tuple(parameters_of(module).values())
        self.tables = [state, parameters_of(module), buffers_of(module), children_of(module)]
        self.contents = [_values(state), *[tuple(table.values()) for table in self.tables[1:]]]
        attributes = [value for name, value in state.items() if name not in USUAL and name not in STANDS]
        below = [value for value in attributes if type(value) not in FIXED]
        # A tuple of numbers, such as a layer's kernel size, cannot change.
        self._boxes = [(box, tuple(_inside(box))) for box in below if isinstance(box, BOXES) and not _is_fixed(box)]
        inside = [item for _, items in self._boxes for item in items]
        held = [*self.contents[1], *self.contents[2], *below, *inside]
        self.tensors = [tensor for tensor in held if isinstance(tensor, Tensor)]
        self.watched = [(tensor, tensor._version) for tensor in self.tensors if not tensor.is_inference()]

    def holds(self, *, deeply: bool = True) -> bool:
        """Return whether nothing has changed. ``deeply`` also compares the items of containers."""
        if not self.known:
            return False
        kind, (state, parameters, buffers, modules) = type(self.module), self.tables
        try:
            now = [_values(state), tuple(parameters.values()), tuple(buffers.values()), tuple(modules.values())]
            if not all(map(same, self.contents, now)) or own_forward(self.module) is not self._forward:
                return False
            for tensor, then in self.watched:
                if tensor._version != then:
                    return False
            for box, items in self._boxes if deeply else ():
                if not same(items, tuple(_inside(box))):
                    return False
            return kind is self.kind[0] and kind.forward is self.kind[1]
        except RuntimeError:  # A container changed while it was read.
            return False

    @property
    def hooked(self) -> bool:
        """True if the module has hooks of other libraries."""
        return bool(forward_hooks_of(self.module) or forward_pre_hooks_of(self.module))


class SubtreeState:
    """The contents of a module and all modules below it, compared together because this runs at thousands of calls."""

    __slots__ = (
        "_dicts", "_forwards", "_hooks", "_inside", "_itself", "_kinds", "_lengths", "_parameters", "_then",
        "_versions", "_watched",
    )  # fmt: skip

    def __init__(self, itself: nn.Module, owns: list[ModuleState]) -> None:
        # A session replaces the module's own "forward", so that module is compared separately.
        self._itself = [own for own in owns if own.module is itself or not own.known]
        inside = [own for own in owns if own.known and own.module is not itself]
        self._inside, self._kinds = [own.module for own in inside], [own.kind[0] for own in inside]
        self._forwards = list({own.kind for own in inside})
        self._dicts = [table for own in inside for table in own.tables]
        self._then = [each for own in inside for contents in own.contents for each in contents]
        self._lengths = [len(contents) for own in inside for contents in own.contents]
        watched = [pair for own in inside for pair in own.watched]
        self._watched, self._versions = [tensor for tensor, _ in watched], [then for _, then in watched]
        self._hooks = [table for each in self._inside for table in (forward_hooks_of(each), forward_pre_hooks_of(each))]
        parameters = [each for own in owns if own.known for each in own.parameters]
        self._parameters = [each for each in parameters if each is not None]

    @property
    def needs_gradient(self) -> bool:
        """True if a parameter in it requires grad."""
        return any(parameter.requires_grad for parameter in self._parameters)

    def obstacle(self) -> str:
        """Return a text about what has changed, or "" if nothing has."""
        if any(self._hooks):
            return "it contains hooks of other libraries"
        try:
            now = list(chain.from_iterable(map(_values_of, self._dicts)))
            versions = [tensor._version for tensor in self._watched]
            holds = same(self._then, now) and versions == self._versions
            holds = holds and list(map(len, self._dicts)) == self._lengths
            holds = holds and list(map(type, self._inside)) == self._kinds
            for kind, forward in self._forwards:
                holds = holds and kind.forward is forward
        except RuntimeError:
            holds = False
        if holds and all(own.holds(deeply=False) for own in self._itself):
            return ""
        return OTHER_STATE


def _values(state: dict[str, Any]) -> Contents:
    # A session installs and removes its own "forward" and "generate" here.
    if "forward" in state or GENERATE in state:
        return tuple([value for name, value in state.items() if name not in STANDS])
    return tuple(state.values())


def _is_fixed(box: Any) -> bool:
    return type(box) is tuple and FIXED.issuperset(map(type, box))


def _inside(box: Any) -> Any:
    """Return the items of a container, or only its length if it is large."""
    if len(box) > MANY:
        return (len(box),)
    return box.values() if isinstance(box, dict) else box


def ambient() -> Contents:
    """Return the global settings of PyTorch that decide how something is computed."""
    cuda = torch.backends.cuda
    return (
        torch.is_inference_mode_enabled(),
        *[(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


def in_the_way() -> str:
    """Return why the result of a call cannot be predicted at present, or "" if it can."""
    if any_mode():
        return "a torch function or dispatch mode is active, which may change operations"
    if in_transform():
        return "a transform of torch.func is running"
    if GLOBAL_FORWARD_HOOKS or GLOBAL_FORWARD_PRE_HOOKS:
        return "there are global module hooks, which may change any call"
    return ""
