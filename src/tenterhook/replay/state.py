"""What a call's result rests on beside its arguments: what modules hold, the modes that are on, randomness."""

from __future__ import annotations

from collections import deque
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.engine.install import SCRIPT
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
    "Own",
    "Together",
    "ambient",
    "digest",
    "in_the_way",
    "moved",
    "reach",
    "version",
]

# What every module has; of these only the children can make it another one. Hooks are looked at apart.
USUAL = frozenset(nn.Module().__dict__) - {"training"}
STANDS = frozenset(["forward", SCRIPT])  # Where a session stands in a module.
SIMPLE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module, Tensor)
OTHER_STATE = "a module in it holds something else than in the recorded run"
FIXED = frozenset({type(None), bool, int, float, str, bytes})
BOXES = (list, tuple, set, frozenset, deque, dict)
MANY = 256  # items of a container beyond which only their number is compared

Contents = tuple[Any, ...]
_values_of = dict.values


def version(tensor: Tensor) -> int:
    """A tensor's version; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version


class Own:
    """What one module holds itself: parameters, buffers, children, attributes, and what lies one step below those.

    It is compared by identity, constants by value, and tensors by their version.
    """

    __slots__ = (
        "_boxes",
        "_forward",
        "below",
        "contents",
        "hidden",
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
        # A scripted module keeps its state where it cannot be looked at.
        self.known = not isinstance(module, torch.jit.ScriptModule) and all(name in state for name in OWN_CONTENT)
        self.tensors: list[Tensor] = []
        self.hidden: list[nn.Module] = []  # Modules that it holds without having registered them.
        self.below: list[tuple[Any, Contents]] = []
        if not self.known:
            return
        self._forward = _own_forward(module)
        self.parameters: Contents = tuple(parameters_of(module).values())
        self.tables = [state, parameters_of(module), buffers_of(module), children_of(module)]
        self.contents = [_values(state), *[tuple(table.values()) for table in self.tables[1:]]]
        attributes = [value for name, value in state.items() if name not in USUAL and name not in STANDS]
        below = [value for value in attributes if type(value) not in FIXED]
        found = [(value, contents) for value in below if (contents := _contents(value)) is not None]
        # A tuple of numbers, as layers keep for their shapes, stays what it is.
        self.below = [(box, inside) for box, inside in found if not _is_fixed(box)]
        # Objects, such as a configuration, may be large and shared by all; they are compared once for a whole run.
        self._boxes = [(value, contents) for value, contents in self.below if isinstance(value, BOXES)]
        inside = [item for _, contents in self.below for item in contents]
        held = [each for each in (*self.contents[1], *self.contents[2], *below, *inside) if type(each) not in FIXED]
        self.tensors = [tensor for tensor in held if isinstance(tensor, Tensor)]
        self.watched = [(tensor, tensor._version) for tensor in self.tensors if not tensor.is_inference()]
        self.hidden = [value for value in held if isinstance(value, nn.Module)]

    def holds(self, *, deeply: bool = True) -> bool:
        """Whether everything is as it was; ``deeply`` also looks into containers."""
        if not self.known:
            return False
        kind, (state, parameters, buffers, modules) = type(self.module), self.tables
        try:
            now = [_values(state), tuple(parameters.values()), tuple(buffers.values()), tuple(modules.values())]
            if now != self.contents or _own_forward(self.module) is not self._forward:
                return False
            for tensor, then in self.watched:
                if tensor._version != then:
                    return False
            for value, contents in self._boxes if deeply else ():
                if _contents(value) != contents:
                    return False
            return kind is self.kind[0] and kind.forward is self.kind[1]
        except (RuntimeError, ValueError, TypeError):  # Arrays and tensors that are not the same cannot be compared so.
            return False

    @property
    def hooked(self) -> bool:
        """Whether other libraries' hooks stand on the module."""
        return bool(forward_hooks_of(self.module) or forward_pre_hooks_of(self.module))


class Together:
    """What a module and those below it hold, compared at one go: thousands of calls ask for it."""

    __slots__ = (
        "_dicts", "_forwards", "_hooks", "_inside", "_itself", "_kinds", "_lengths", "_parameters", "_then",
        "_versions", "_watched",
    )  # fmt: skip

    def __init__(self, itself: nn.Module, owns: list[Own]) -> None:
        # A session stands in the module's own "forward", so that it is compared apart.
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
        """Whether a parameter in it takes part in gradients."""
        return any(parameter.requires_grad for parameter in self._parameters)

    def obstacle(self) -> str:
        """What is not as it was, in words."""
        if any(self._hooks):
            return "other libraries' hooks stand inside it"
        try:
            now = list(chain.from_iterable(map(_values_of, self._dicts)))
            versions = [tensor._version for tensor in self._watched]
            same = now == self._then and versions == self._versions and list(map(len, self._dicts)) == self._lengths
            same = same and list(map(type, self._inside)) == self._kinds
            for kind, forward in self._forwards:
                same = same and kind.forward is forward
        except (RuntimeError, ValueError, TypeError):
            same = False
        if same and all(own.holds(deeply=False) for own in self._itself):
            return ""
        return OTHER_STATE


def moved(below: list[tuple[Any, Contents, list[nn.Module]]]) -> set[nn.Module]:
    """The modules that hold a container or an object in which there is something else now."""
    found: set[nn.Module] = set()
    for value, contents, holders in below:
        try:
            same = _contents(value) == contents
        except (RuntimeError, ValueError, TypeError):
            same = False
        if not same:
            found.update(holders)
    return found


def _values(state: dict[str, Any]) -> Contents:
    # A session stands there, and comes and goes.
    if "forward" in state:
        return tuple([value for name, value in state.items() if name not in STANDS])
    return tuple(state.values())


def _is_fixed(box: Any) -> bool:
    return type(box) is tuple and FIXED.issuperset(map(type, box))


def _own_forward(module: nn.Module) -> Any:
    """The forward that stands on the instance, but for a session's."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return None
    tap = getattr(getattr(forward, "__func__", None), "tap", None)
    return tap.own if tap is not None and getattr(tap, "module", None) is module else forward


def _contents(value: Any) -> Contents | None:
    """What lies in a container or an object of somebody's own, or None where nothing does, or it cannot change."""
    if type(value) in FIXED:
        return None
    if isinstance(value, BOXES[:-1]):
        return tuple(value) if len(value) <= MANY else (len(value),)
    if isinstance(value, dict):
        return tuple(value.values()) if len(value) <= MANY else (len(value),)
    if isinstance(value, SIMPLE) or not hasattr(value, "__dict__"):
        return None
    return tuple(vars(value).values())


def reach(module: nn.Module, known: dict[nn.Module, Own]) -> dict[nn.Module, None]:
    """The modules that a call may use: those below it, and those that it or they hold without having registered."""
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found[each] = None
            waiting += (known.get(each) or Own(each)).hidden
            waiting += [child for child in children_of(each).values() if child is not None]
    return found


def ambient() -> Contents:
    """The switches of PyTorch that decide how something is computed."""
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
    """What makes it impossible to know what a call would do, in words; nothing where it is possible."""
    if any_mode():
        return "a torch function or dispatch mode is on, which may change what operations do"
    if in_transform():
        return "a transform of torch.func is running"
    if GLOBAL_FORWARD_HOOKS or GLOBAL_FORWARD_PRE_HOOKS:
        return "there are global module hooks, which may do anything at any call"
    return ""


def digest(tensors: list[Tensor]) -> list[int]:
    """A sum over the bits of each tensor, which also sees what was written past the version counter."""
    with torch.no_grad():
        sums = [_sum_of_bits(tensor.detach()) for tensor in tensors]
    if len({each.device for each in sums}) > 1:
        sums = [each.cpu() for each in sums]
    return torch.stack(sums).tolist() if sums else []


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.is_meta or tensor.layout is not torch.strided or type(tensor) is not Tensor or tensor.is_quantized:
        return torch.zeros((), dtype=torch.int64, device=tensor.device if not tensor.is_meta else "cpu")
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    wide = flat.numel() - flat.numel() % 8 if flat.storage_offset() % 8 == 0 else 0
    return flat[:wide].view(torch.int64).sum() + flat[wide:].sum(dtype=torch.int64)
