"""The interface of a tool, and the tools that need no environment of their own.

A method that a tool does not support raises :class:`Unable`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

__all__ = ["TOOLS", "Call", "Change", "Raw", "Tenterhook", "Tool", "Unable", "same", "torch_state"]

Change = Callable[[Any], Any]


class Unable(Exception):
    """An error: the tool has no way to do this."""


@dataclass(init=False)
class Call:
    """A call of a model, with everything that a tool needs to make it.

    ``loss`` reduces the output to a number for ``backward``. ``meanwhile`` runs after the call, while the tool is still
    active.
    """

    model: Any
    args: tuple[Any, ...]
    loss: Callable[[Any], Any]
    meanwhile: Callable[[], None] | None

    def __init__(
        self,
        model: Any,
        *args: Any,
        loss: Callable[[Any], Any] = lambda output: output,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.args, self.loss, self.meanwhile = model, args, loss, meanwhile

    def __call__(self) -> Any:
        output = self.model(*self.args)
        if self.meanwhile is not None:
            self.meanwhile()
        return self.loss(output)

    def plainly_of(self, model: nn.Module) -> tuple[Any, ...]:
        """Return the arguments, for a tool that calls the model itself and cannot run ``meanwhile``."""
        if self.model is not model or self.meanwhile is not None:
            raise Unable
        return self.args


class Tool:
    """The interface of a tool: record the output of a module, record its gradient, and edit it."""

    name = ""
    began: dict[str, int] | None = None
    """The functions of PyTorch before the tool was imported."""

    def value(self, model: nn.Module, name: str, call: Call) -> Any:
        """Return the output of a module in one call of the model."""
        raise Unable

    def values(self, model: nn.Module, names: list[str], call: Call) -> Any:
        """Return the outputs of several modules."""
        raise Unable

    def gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        """Return the gradient of a module's output. The call returns the loss, and ``backward`` is called on it."""
        raise Unable

    def input_gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        """Return the gradient of a module's first argument, through that module."""
        raise Unable

    def edit(self, model: nn.Module, name: str, change: Change, call: Call) -> Any:
        """Return the result of a call in which a module's output is replaced."""
        raise Unable


class Raw(Tool):
    """PyTorch's own hooks, as most people write them."""

    name = "raw hooks"

    def value(self, model: nn.Module, name: str, call: Call) -> Any:
        return self.values(model, [name], call)[name]

    def values(self, model: nn.Module, names: list[str], call: Call) -> Any:
        kept: dict[str, Any] = {}
        handles = [
            model.get_submodule(name).register_forward_hook(lambda _m, _a, out, name=name: kept.__setitem__(name, out))  # type: ignore[misc]
            for name in names
        ]
        try:
            call()
        finally:
            for handle in handles:
                handle.remove()
        return kept

    def gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        kept: dict[str, Any] = {}
        module = model.get_submodule(name)
        with module.register_full_backward_hook(lambda _m, _i, out: kept.__setitem__("g", out[0])):
            call().backward()
        return kept["g"]

    def input_gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        kept: dict[str, Any] = {}
        module = model.get_submodule(name)
        with module.register_full_backward_hook(lambda _m, inp, _o: kept.__setitem__("g", inp[0])):
            call().backward()
        return kept["g"]

    def edit(self, model: nn.Module, name: str, change: Change, call: Call) -> Any:
        with model.get_submodule(name).register_forward_hook(lambda _m, _a, out: change(out)):
            return call()


class Trace:
    """A small tracer in the style of baukit, as interpretability code often contains.

    It registers hooks on the given modules when it is created, stores the last output of each, and removes the hooks at
    the end of the block.
    """

    def __init__(self, model: nn.Module, names: list[str], *, retain: bool = False, edit: Change | None = None) -> None:
        self.outputs: dict[str, Any] = {}
        self._handles = []
        modules = dict(model.named_modules())
        for name in names:
            if name not in modules:
                raise LookupError(name)
            self._handles.append(modules[name].register_forward_hook(self._hook(name, retain=retain, edit=edit)))

    def _hook(self, name: str, *, retain: bool, edit: Change | None) -> Callable[..., Any]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            if edit is not None:
                output = edit(output)
            if retain:
                output.retain_grad()
            self.outputs[name] = output
            return output

        return hook

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


class Tracer(Tool):
    """Code in the style of baukit."""

    name = "baukit-style"

    def value(self, model: nn.Module, name: str, call: Call) -> Any:
        return self.values(model, [name], call)[name]

    def values(self, model: nn.Module, names: list[str], call: Call) -> Any:
        with Trace(model, names) as trace:
            call()
        return trace.outputs

    def gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        with Trace(model, [name], retain=True) as trace:
            call().backward()
        return trace.outputs[name].grad

    def edit(self, model: nn.Module, name: str, change: Change, call: Call) -> Any:
        with Trace(model, [name], edit=change):
            return call()


class Tenterhook(Tool):
    """This library."""

    name = "tenterhook"

    def value(self, model: nn.Module, name: str, call: Call) -> Any:
        return self.values(model, [name], call)[name]

    def values(self, model: nn.Module, names: list[str], call: Call) -> Any:
        import tenterhook as th

        with th.record(model, *names) as tape:
            call()
        return tape

    def gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        import tenterhook as th

        with th.record(model, name, grad=True) as tape:
            call().backward()
        return tape.grad[name]

    def input_gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        return self.gradient(model, f"{name}:in", call)

    def edit(self, model: nn.Module, name: str, change: Change, call: Call) -> Any:
        import tenterhook as th

        with th.edit(model, {name: change}):
            return call()


TOOLS: dict[str, Tool] = {tool.name: tool for tool in (Tenterhook(), Raw(), Tracer())}


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, within a small tolerance."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one.detach(), other.detach(), rtol=1e-5, atol=1e-7)
    return type(one) is type(other) and one == other


def torch_state() -> dict[str, int]:
    """Return the ``id`` of every callable in PyTorch's main namespaces, by name."""
    spaces = {"torch": torch, "Tensor": torch.Tensor, "functional": nn.functional, "Module": nn.Module}
    return {
        f"{at}.{name}": id(value)
        for at, space in spaces.items()
        for name, value in vars(space).items()
        if callable(value)
    }
