"""Risks of the hooks that an audit found. Each check looks at one row and yields the risks that apply."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.address import escape
from tenterhook.address.walk import walk
from tenterhook.audit.owner import can_be_pickled, held
from tenterhook.audit.rows import CALL_KINDS, AuditRow, HookKind, HookRisk
from tenterhook.pytorch.dynamo import is_compiled_wrapper
from tenterhook.pytorch.module_calls import children_of
from tenterhook.sites.inplace import changes_in_place
from tenterhook.sites.module import can_be_called, compiled_call

__all__ = ["NEVER_CALLED", "NOT_FIRED", "with_risks"]

LEGACY = HookRisk(
    "legacy backward",
    "it sees the gradients of the module's last operation only, which are wrong for a module of several operations.",
    "Use tenterhook.hooks.register_backward_hook, or register_full_backward_hook.",
)
IN_PLACE = HookRisk(
    "in-place neighbour",
    "PyTorch's backward hooks return views that cannot be changed in place, so the call may raise.",
    "Use tenterhook.hooks.register_backward_hook, or make the operation out of place.",
)
GRAPH = HookRisk(
    "holds a graph",
    "the hook references a tensor with a grad_fn, which keeps its graph and all saved activations alive.",
    "Keep tensor.detach(), or record with tenterhook.record.",
)
OWN_TENSOR = HookRisk(
    "never freed",
    "the hook references its own tensor through autograd, which Python's garbage collector cannot traverse.",
    "Use the argument of the hook, or a weakref.",
)
PARALLEL = HookRisk(
    "data parallel",
    "replicas run the hook in several threads at once; attributes that it sets on the replica are lost.",
    "Use DistributedDataParallel, or make the hook safe for threads.",
)
COMPILED = HookRisk(
    "compiled",
    "a hook that is registered after the first compiled call may be ignored silently.",
    "Register hooks before the first call, or call torch.compiler.reset() afterwards.",
)
FAST_PATH = HookRisk(
    "leaves the fast path",
    "a forward hook at or below an nn.TransformerEncoderLayer makes it take its slower path in eval mode.",
    "Remove it when you no longer need it. The last bits of the output differ between the two paths.",
)
NO_PICKLE = HookRisk(
    "does not pickle",
    "pickle cannot find a lambda or local function by name, so torch.save(model) and spawned workers fail.",
    "Define the function at module level, or save the state_dict.",
)
NEVER_CALLED = HookRisk(
    "never called",
    "the model never calls this module, so its hooks do not run.",
    "Register the hook on its parent or on its children.",
)
TWICE = HookRisk(
    "registered twice",
    "the same function is registered on this module more than once, and runs once for each registration.",
    "Remove one, and keep the handle of the other.",
)
ELSEWHERE = HookRisk(
    "bound elsewhere",
    "this forward runs the forward and the weights of another module, which happens after a deepcopy.",
    "Delete the forward of the instance, and patch the copy separately.",
)
EVERYWHERE = HookRisk(
    "global",
    "it runs at each call of every module in the process, and disables the fast path of nn.Module.__call__.",
    "Register it on the modules that need it.",
)
ANOMALY = HookRisk(
    "anomaly mode",
    "every operation records a stack trace, and the backward pass is checked for NaN.",
    "Switch it off outside debugging: torch.autograd.set_detect_anomaly(False).",
)
NO_EFFECT = HookRisk(
    "no effect",
    "Python looks up __call__ on the class, so the __call__ of an instance is never used.",
    "Set forward, or register a hook.",
)
NOT_FIRED = HookRisk(
    "did not fire",
    "the model ran with the given inputs, and the hook was not called.",
    "Check that these inputs reach the module, and that its output is a tensor or a tuple of tensors.",
)

NATIVE_BACKWARD = (HookKind.FULL_BACKWARD, HookKind.BACKWARD_PRE)
GLOBAL_CALLS = (
    HookKind.GLOBAL_FORWARD_PRE, HookKind.GLOBAL_FORWARD, HookKind.GLOBAL_BACKWARD_PRE, HookKind.GLOBAL_FULL_BACKWARD,
    HookKind.GLOBAL_LEGACY_BACKWARD,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The position of each module in the tree, which some risks depend on."""

    above: dict[int, list[nn.Module]]
    """the ancestors of each module, nearest first"""
    after: dict[int, nn.Module]
    """the next sibling of each module"""

    @classmethod
    def of(cls, model: nn.Module) -> Surroundings:
        above: dict[int, list[nn.Module]] = {id(model): []}
        after: dict[int, nn.Module] = {}
        for _, module in walk(model, as_built=True)[0]:  # Parents come before their children.
            children = [child for _, child in children_of(module).items() if child is not None]
            for child in children:
                above.setdefault(id(child), [module, *above[id(module)]])
            after.update({id(one): other for one, other in itertools.pairwise(children)})
        return cls(above, after)


def with_risks(model: nn.Module, rows: list[AuditRow]) -> list[AuditRow]:
    """Return the same rows, each with its risks."""
    around = Surroundings.of(model)
    return [replace(row, risks=tuple(_risks(row, around))) for row in rows]


def _risks(row: AuditRow, around: Surroundings) -> Iterator[HookRisk]:
    if row.session:  # tenterhook's sessions avoid these risks and remove their hooks when they close.
        return
    yield from _by_kind(row)
    if row.table is not None:
        yield from _by_function(row)
    if row.kind in CALL_KINDS and row.module is not None:
        yield from _by_place(row, row.module, around)
        if row.table is not None and sum(_same(row.hook, other) for other in row.table.hooks.values()) > 1:
            yield TWICE
    if row.kind is HookKind.OWN_FORWARD and row.module is not None:
        yield from _elsewhere(row.module, row.hook)


def _by_kind(row: AuditRow) -> Iterator[HookRisk]:
    if row.kind in (HookKind.LEGACY_BACKWARD, HookKind.GLOBAL_LEGACY_BACKWARD):
        yield LEGACY
    if row.kind in GLOBAL_CALLS:
        yield EVERYWHERE
    if row.kind is HookKind.ANOMALY:
        yield ANOMALY
    if row.kind is HookKind.OWN_CALL and row.key == "__call__":
        yield NO_EFFECT


# --- the function -----------------------------------------------------------------------------------------------------


def _by_function(row: AuditRow) -> Iterator[HookRisk]:
    for label, value in held(row.hook):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            yield replace(GRAPH, detail=label)
            break
    if row.tensor is not None and _holds_for_ever(row, row.tensor):
        yield OWN_TENSOR
    if row.module is not None and row.tensor is None and not can_be_pickled(row.hook):
        yield NO_PICKLE


def _holds_for_ever(row: AuditRow, tensor: Tensor) -> bool:
    # On a tensor, the garbage collector traverses only the gradient hooks of a leaf.
    if row.kind is HookKind.GRADIENT and tensor.grad_fn is None:
        return False
    return any(value is tensor or _has(value, tensor) for _, value in held(row.hook))


def _has(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, nn.Module) and any(own is tensor for own in (*value.parameters(), *value.buffers()))


def _same(one: Any, other: Any) -> bool:
    # Two bound methods are equal if they have the same object and function.
    return one is other or (isinstance(one, MethodType) and one == other)


# --- the place --------------------------------------------------------------------------------------------------------


def _by_place(row: AuditRow, module: nn.Module, around: Surroundings) -> Iterator[HookRisk]:
    above = around.above.get(id(module), [])
    if row.kind in NATIVE_BACKWARD and (detail := _in_place(module, around)):
        yield replace(IN_PLACE, detail=detail)
    if any(isinstance(each, nn.DataParallel) for each in above):
        yield PARALLEL
    if any(_compiles_calls(each) for each in above) or compiled_call(module) is not None:
        yield COMPILED
    native_forward = row.kind in (HookKind.FORWARD, HookKind.FORWARD_PRE)
    if native_forward and any(isinstance(each, nn.TransformerEncoderLayer) for each in (module, *above)):
        yield FAST_PATH
    if detail := _why_never_called(module, above):
        yield replace(NEVER_CALLED, detail=detail)


def _in_place(module: nn.Module, around: Surroundings) -> str:
    """Return a description of the in-place operation that would fail on the views of a backward hook on this module."""
    if _starts_in_place(module):
        return f"{type(module).__name__} itself"
    following = around.after.get(id(module))
    if following is not None and _starts_in_place(following):
        return f"{type(following).__name__} after it"
    parent = next(iter(around.above.get(id(module), [])), None)
    if parent is not None and vars(parent).get("inplace") is not True and changes_in_place(parent):
        return f"the forward of {type(parent).__name__} around it"
    return ""


def _starts_in_place(module: nn.Module) -> bool:
    """Return True if the module, or the first step of a Sequential, may change its input in place."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return changes_in_place(module)


def _compiles_calls(module: nn.Module) -> bool:
    wrapper = is_compiled_wrapper(module)
    return wrapper or compiled_call(module) is not None


def _why_never_called(module: nn.Module, above: list[nn.Module]) -> str:
    parent = above[0] if above else None
    if not can_be_called(module):
        return f"a {type(module).__name__} has no forward"
    if isinstance(parent, nn.MultiheadAttention) and module is parent.out_proj:
        return "nn.MultiheadAttention uses the weight of its out_proj and never calls the module"
    if isinstance(parent, torch.jit.ScriptModule):
        return "a scripted module runs its submodules without Python"
    return ""


# --- an instance's own forward ----------------------------------------------------------------------------------------


def _elsewhere(module: nn.Module, forward: Any) -> Iterator[HookRisk]:
    for other in _bound_to(forward):
        # A wrapper may call a module of another class. Another module of the same class suggests a deepcopy.
        if other is not module and type(other) is type(module):
            yield replace(ELSEWHERE, detail=f"another {escape(type(other).__name__)}")
            return


def _bound_to(forward: Any) -> Iterator[nn.Module]:
    """Yield the modules whose methods a forward calls."""
    if isinstance(forward, functools.partial):
        yield from (value for value in forward.args if isinstance(value, nn.Module))
    candidates = [forward, *(value for label, value in held(forward) if "." not in label)]
    for value in candidates:
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            yield value.__self__
