"""The identity of a harvest: everything that its rows depend on, as stored in the manifest.

A resumed harvest is compared with it, and each difference is reported. State that a model changes while it runs (a
counter, a cache) is found by describing the model before and after its first batch. It is not compared.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook.engine.session import open_here
from tenterhook.errors import HarvestError
from tenterhook.harvest import identity_code as code
from tenterhook.harvest.identity_values import ADDRESS, SKIPPED, Describer, Tree, differences
from tenterhook.harvest.weights_digest import digest_of, weights_of
from tenterhook.pytorch.hook_tables import BACKWARD, BACKWARD_PRE, FORWARD, FORWARD_PRE
from tenterhook.pytorch.module_calls import buffers_of, non_persistent_buffers_of

if TYPE_CHECKING:
    from tenterhook.harvest.job import Job

__all__ = ["Identity", "identify"]

CANNOT = (
    "these parts cannot be identified, so a resumed harvest could not detect changes in them:\n{lines}\nPass them "
    "as values, functions or plain objects, or accept them: trust=True (--trust)."
)
MOST = 20  # maximum number of lines in an error
ROOT = "(root)"
PLUMBING = {*vars(nn.Module()), "_hf_hook", "_old_forward", "_is_hf_initialized", "_is_fsdp_managed_module"} - {
    "training"
}
"""Attributes that PyTorch and accelerate store in a module for their own use."""
WRAPPERS = {"DistributedDataParallel", "DataParallel", "OptimizedModule", "FullyShardedDataParallel"}
"""Modules that wrap another one. Their attributes belong to this process and not to the model."""
HOOKS = (FORWARD_PRE, FORWARD, BACKWARD_PRE, BACKWARD)
SPREADING = ("tenterhook.", "accelerate.", "torch.distributed.")
ROOTS = {"forward", "__call__", "__getattr__"}


@dataclass
class Identity:
    """The description of a harvest: a tree of texts, the table of values that they refer to, and the unknown parts."""

    tree: dict[str, Any]
    values: dict[str, Any]
    unknown: dict[str, str] = field(default_factory=dict)

    def differences(self, tree: Any, values: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield the differences from another description: the place, the other value, and this value."""
        yield from differences((tree, values), (self.tree, self.values))

    def check_known(self) -> None:
        """Raise ``HarvestError`` if a part cannot be identified."""
        if self.unknown:
            lines = [f"  {where}: {what}" for where, what in self.unknown.items()]
            raise HarvestError(CANNOT.format(lines=shortened(lines)))

    def changed_since(self, before: Identity) -> list[str]:
        """Return the places at which this description differs from an earlier one."""
        return sorted({where for where, _, _ in self.differences(before.tree, before.values)})


def shortened(lines: list[str]) -> str:
    """Join lines, and shorten a long list."""
    more = [f"  … and {len(lines) - MOST} more"] if len(lines) > MOST else []
    return "\n".join([*lines[:MOST], *more])


def identify(job: Job, cutting: dict[str, Any], *, weights: bool = True) -> Identity:
    """Describe a job: the model, its code, its weights, the user's functions, and how the data is split."""
    describer = Describer(job.model)
    describer.modules_by(lambda module, where: _apart(describer, module, where))
    model: dict[str, Any] = {
        "class": code.name_of(type(job.model)),
        "weights": weights_of(job.model) if weights else None,
        "training": job.model.training,
        "state": _state(describer, job.model),
        "modules": describe_modules(describer, job.model, "model"),
        "edits": _edits(describer, job.model),
    }
    functions = {"mask": job.taking.mask, "reduce": job.taking.reduce, "grad": job.grad, "call": job.call}
    tree = {"model": model, "points": list(job.addresses), **job.taking.described()}
    for name, function in functions.items():
        tree[name] = function if isinstance(function, str | None) else describer.of(function, f"{name}=")
    if job.generate is not None:
        tree["generate"] = describer.of(dict(job.generate), "generate=")
    tokenizer = cutting.get("tokenizer")
    tree["tokenizer"] = None if tokenizer is None else describer.of(tokenizer, "tokenizer=")
    tree["length"] = None if tokenizer is None else cutting.get("length")
    return Identity(tree, describer.values, describer.unknown)


def _state(describer: Describer, model: nn.Module) -> Tree:
    """Describe the entries of a state dict that are not tensors: the extra state of modules."""
    rest = {name: value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}
    with describer.quietly():
        return describer.of(rest, "state_dict") if rest else "no extra state"


def _edits(describer: Describer, model: nn.Module) -> dict[str, Tree]:
    """Describe the edits of this thread's open sessions on the model. Rows are harvested with these edits."""
    modules = set(map(id, model.modules()))
    found: dict[str, Tree] = {}
    for session in open_here():
        if not modules.isdisjoint(map(id, session.model.modules())):
            for place, binding in enumerate(session.bindings):
                if not binding.action.observes:
                    what = binding.action.change or binding.action  # The rest of the action counts calls.
                    found[f"{place} at {binding.point}"] = describer.of(what, f"an edit at {binding.point}")
    return found


def _apart(describer: Describer, model: nn.Module, where: str) -> Tree:
    """Describe a model that one of the user's functions refers to."""
    weights = weights_of(model)
    return {"weights": weights, "modules": describer.keep(describe_modules(describer, model, where))}


def describe_modules(describer: Describer, model: nn.Module, where: str) -> dict[str, Tree]:
    """Describe every module of a model, by its path."""
    found = {}
    for path, module in model.named_modules():
        with describer.quietly(quiet=code.is_library(_own_class(module))):
            found[path or ROOT] = describer.keep(_module(describer, module, f"{where} {path or ROOT}"))
    return found


def _module(describer: Describer, module: nn.Module, where: str) -> dict[str, Tree]:
    cls = _own_class(module)
    tree: dict[str, Tree] = {"class": code.name_of(cls)}
    if cls.__name__ in WRAPPERS:
        return tree
    if isinstance(module, torch.fx.GraphModule | torch.jit.ScriptModule):
        return tree | {"training": str(module.training), "code": describer.of(_graph(module), where)}
    tree["extra_repr"] = _said(module)
    tree |= _buffers(module)
    for name, value in sorted(vars(module).items()):
        if name not in PLUMBING | SKIPPED and not name.startswith("__") and _counts(cls, name, value):
            tree[name] = describer.of(value, f"{where}, attribute {name}")
    if not code.is_library(cls):
        methods = code.reached(cls, ROOTS)
        tree |= {f"{name}()": each for name, each in describer.members(methods, f"{where}, method").items()}
    return tree | _hooks(describer, module, where)


def _own_class(module: nn.Module) -> type:
    """Return the class of a module, without the class that FSDP2 adds before it."""
    mixed = {"FSDPModule", "ParametrizationList"}
    cls = type(module)
    if mixed.intersection(base.__name__ for base in cls.__bases__) and len(cls.__bases__) > 1:
        return cls.__bases__[-1]
    return cls


def _graph(module: nn.Module) -> str:
    try:
        return str(getattr(module, "code", ""))
    except Exception:  # noqa: BLE001  # a script without a forward has no code
        return ""


def _said(module: nn.Module) -> str:
    try:
        return ADDRESS.sub("0x…", module.extra_repr())
    except Exception as error:  # noqa: BLE001  # user code that does not affect the computation
        return f"({type(error).__name__})"


def _buffers(module: nn.Module) -> dict[str, Tree]:
    """Describe the buffers that are not in the state dict."""
    found = {name: buffers_of(module).get(name) for name in sorted(non_persistent_buffers_of(module))}
    return {f"buffer {name}": _tensor(each) for name, each in found.items() if each is not None}


def _tensor(tensor: Tensor) -> str:
    if hasattr(tensor, "full_tensor"):  # Each process has another part of it.
        return f"{tensor.dtype} {list(tensor.shape)}, spread"
    return digest_of(tensor)


def _counts(cls: type, name: str, value: Any) -> bool:
    """Return whether an attribute configures the module. Opaque objects in library modules do not."""
    inner = getattr(value, "func", value)
    if name == "forward" and (not isinstance(inner, types.FunctionType | types.MethodType) or _is_library(inner)):
        return False
    if not code.is_library(cls):
        return True
    plain = (bool, int, float, complex, str, bytes, tuple, list, set, frozenset, dict, Tensor, torch.dtype, type)
    return value is None or isinstance(value, plain) or callable(value) or callable(getattr(value, "to_dict", None))


def _is_library(function: Any) -> bool:
    return code.is_library(getattr(function, "__func__", function))


def _hooks(describer: Describer, module: nn.Module, where: str) -> dict[str, Tree]:
    """Describe the hooks of a module, except those of sessions and of libraries that distribute a model."""
    found: dict[str, Tree] = {}
    for kind in HOOKS:
        hooks = (getattr(module, kind, None) or {}).values()
        kept = [hook for hook in hooks if not _module_of(hook).startswith(SPREADING)]
        for place, hook in enumerate(kept):
            found[f"{kind.strip('_')[:-1]} {place}"] = describer.of(hook, f"{where}, a hook")
    return found


def _module_of(hook: Any) -> str:
    function = getattr(hook, "__func__", hook)
    named = isinstance(function, types.FunctionType | types.BuiltinFunctionType)
    return f"{code.module_of(function if named else type(hook))}."
