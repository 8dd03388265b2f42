"""The tools under test, each with the same few verbs; a verb that a tool does not have raises ``Unable``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["TOOLS", "Raw", "Tenterhook", "Tool", "Tracer", "Unable"]

Run = Callable[[], Any]


class Unable(Exception):
    """The tool has no way to do this."""


class Tool:
    """What a tool is asked to do: the output of one module, its gradient, and a change of it."""

    name = ""

    def value(self, model: nn.Module, name: str, run: Run) -> Any:
        """The output of a module in one run."""
        raise Unable

    def gradient(self, model: nn.Module, name: str, run: Run) -> Any:
        """The gradient of a module's output; ``run`` gives the loss, and ``backward`` is called on it."""
        raise Unable

    def input_gradient(self, model: nn.Module, name: str, run: Run) -> Any:
        """The gradient of a module's first argument, through that module."""
        raise Unable

    def edit(self, model: nn.Module, name: str, change: Callable[[Any], Any], run: Run) -> Any:
        """The result of a run in which a module's output is replaced."""
        raise Unable


class Raw(Tool):
    """PyTorch's own hooks, as most people write them."""

    name = "raw hooks"

    def value(self, model: nn.Module, name: str, run: Run) -> Any:
        kept: dict[str, Any] = {}
        with model.get_submodule(name).register_forward_hook(lambda _m, _a, out: kept.__setitem__("v", out)):
            run()
        return kept["v"]

    def gradient(self, model: nn.Module, name: str, run: Run) -> Any:
        kept: dict[str, Any] = {}
        module = model.get_submodule(name)
        with module.register_full_backward_hook(lambda _m, _i, out: kept.__setitem__("g", out[0])):
            run().backward()
        return kept["g"]

    def input_gradient(self, model: nn.Module, name: str, run: Run) -> Any:
        kept: dict[str, Any] = {}
        module = model.get_submodule(name)
        with module.register_full_backward_hook(lambda _m, inp, _o: kept.__setitem__("g", inp[0])):
            run().backward()
        return kept["g"]

    def edit(self, model: nn.Module, name: str, change: Callable[[Any], Any], run: Run) -> Any:
        with model.get_submodule(name).register_forward_hook(lambda _m, _a, out: change(out)):
            return run()


class Tracer(Tool):
    """The forward hook in a class that many projects carry around: detach, keep the last, retain the gradient."""

    name = "usual tracer"

    def value(self, model: nn.Module, name: str, run: Run) -> Any:
        kept: dict[str, Any] = {}
        module = dict(model.named_modules())[name]
        handle = module.register_forward_hook(lambda _m, _a, out: kept.__setitem__("v", out.detach()))
        run()
        handle.remove()
        return kept["v"]

    def gradient(self, model: nn.Module, name: str, run: Run) -> Any:
        kept: dict[str, Any] = {}

        def hook(_m: Any, _a: Any, out: Any) -> None:
            out.retain_grad()
            kept["v"] = out

        handle = dict(model.named_modules())[name].register_forward_hook(hook)
        run().backward()
        handle.remove()
        return kept["v"].grad

    def edit(self, model: nn.Module, name: str, change: Callable[[Any], Any], run: Run) -> Any:
        handle = dict(model.named_modules())[name].register_forward_hook(lambda _m, _a, out: change(out))
        result = run()
        handle.remove()
        return result


class Tenterhook(Tool):
    """This library."""

    name = "tenterhook"

    def value(self, model: nn.Module, name: str, run: Run) -> Any:
        import tenterhook as th

        with th.record(model, name) as tape:
            run()
        return tape[name]

    def gradient(self, model: nn.Module, name: str, run: Run) -> Any:
        import tenterhook as th

        with th.record(model, name, grad=True) as tape:
            run().backward()
        return tape.grad[name]

    def input_gradient(self, model: nn.Module, name: str, run: Run) -> Any:
        import tenterhook as th

        with th.record(model, f"{name}:in", grad=True) as tape:
            run().backward()
        return tape.grad[f"{name}:in"]

    def edit(self, model: nn.Module, name: str, change: Callable[[Any], Any], run: Run) -> Any:
        import tenterhook as th

        with th.edit(model, {name: change}):
            return run()


TOOLS: dict[str, Tool] = {tool.name: tool for tool in (Tenterhook(), Raw(), Tracer())}


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, to the last bit or nearly so."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one.detach(), other.detach(), rtol=1e-5, atol=1e-7)
    return type(one) is type(other) and one == other
