"""Other libraries, each used as its documentation recommends. They are imported in their own environments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from hazards.tools import TOOLS, Call, Change, Tool, Unable

__all__ = ["PACKAGES", "PEERS", "tool_called"]


class Peer(Tool):
    """A library that is imported before the first case."""

    module = ""
    package = ""

    def load(self) -> str:
        """Import the library, and return its version."""
        import_module(self.module)
        return version(self.package)


class NNsight(Peer):
    """A wrapper and a trace, inside which values are saved and set."""

    name, module, package = "nnsight", "nnsight", "nnsight"

    def value(self, model: nn.Module, name: str, call: Call) -> Any:
        import nnsight

        wrapped: Any = nnsight.NNsight(call.model)
        target = _inner(wrapped, model, name, call)
        with wrapped.trace(*call.args):
            kept = target.output.save()
            if call.meanwhile is not None:
                call.meanwhile()
        return kept

    def values(self, model: nn.Module, names: list[str], call: Call) -> Any:
        import nnsight

        wrapped: Any = nnsight.NNsight(call.model)
        kept = {}
        with wrapped.trace(*call.args):
            for name in names:
                kept[name] = wrapped.get(name).output.save()
        return kept

    def gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        import nnsight

        wrapped: Any = nnsight.NNsight(call.model)
        target = _inner(wrapped, model, name, call)
        with wrapped.trace(*call.args):
            output = target.output
            part = output["y"] if isinstance(output, dict) else output
            with call.loss(wrapped.output).backward():
                kept = part.grad.save()
        return kept

    def input_gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        import nnsight

        wrapped: Any = nnsight.NNsight(call.model)
        target = _inner(wrapped, model, name, call)
        with wrapped.trace(*call.args):
            given = target.input
            with call.loss(wrapped.output).backward():
                kept = given.grad.save()
        return kept

    def edit(self, model: nn.Module, name: str, change: Change, call: Call) -> Any:
        import nnsight

        wrapped: Any = nnsight.NNsight(call.model)
        target = _inner(wrapped, model, name, call)
        with wrapped.trace(*call.args):
            target.output = change(target.output)
            result = wrapped.output.save()
            if call.meanwhile is not None:
                call.meanwhile()
        return call.loss(result)


def _inner(wrapped: Any, model: nn.Module, name: str, call: Call) -> Any:
    """Return the module inside a wrapper. torch.compile may have added another wrapper."""
    return wrapped.get(name if call.model is model else f"_orig_mod.{name}")


class TransformerLens(Peer):
    """A hook point after the module, in a hooked root, as the library requires for other models."""

    name, module, package = "TransformerLens", "transformer_lens.HookedRootModule", "transformer-lens"

    def value(self, model: nn.Module, name: str, call: Call) -> Any:
        with self._hooked(model, name, call) as (root, point):
            _, cache = root.run_with_cache(*call.args)
        return cache[point]

    def gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        with self._hooked(model, name, call) as (root, point):
            cache, forward, backward = root.get_caching_hooks(incl_bwd=True)
            with root.hooks(forward, backward):
                call.loss(root(*call.args)).backward()
        return cache[f"{point}_grad"]

    def edit(self, model: nn.Module, name: str, change: Change, call: Call) -> Any:
        with self._hooked(model, name, call) as (root, point):
            return call.loss(root.run_with_hooks(*call.args, fwd_hooks=[(point, lambda value, hook: change(value))]))

    @staticmethod
    @contextlib.contextmanager
    def _hooked(model: nn.Module, name: str, call: Call) -> Iterator[tuple[Any, str]]:
        """Add a hook point after the module, as an author would write it, and remove it at the end."""
        from transformer_lens.hook_points import HookPoint
        from transformer_lens.HookedRootModule import HookedRootModule

        class Pointed(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner, self.hook_out = inner, HookPoint()

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return self.hook_out(self.inner(*args, **kwargs))

        class Root(HookedRootModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                self.setup()

            def forward(self, *args: Any) -> Any:
                return self.model(*args)

        call.plainly_of(model)
        above, _, last = name.rpartition(".")
        siblings, inner = model.get_submodule(above)._modules, model.get_submodule(name)
        siblings[last] = Pointed(inner)
        try:
            yield Root(), f"model.{name}.hook_out"
        finally:
            siblings[last] = inner


class TorchLens(Peer):
    """A trace of every operation."""

    name, module, package = "torchlens", "torchlens", "torchlens"

    def value(self, model: nn.Module, name: str, call: Call) -> Any:
        import torchlens

        call.plainly_of(model)
        return torchlens.trace(model, list(call.args)).modules[name].out

    def gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        return self._backward(model, call).modules[name].grad

    def input_gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        traced = self._backward(model, call)
        return traced[traced.modules[name].input_layers[0]].grad

    @staticmethod
    def _backward(model: nn.Module, call: Call) -> Any:
        import torchlens

        call.plainly_of(model)
        wanted = torchlens.options.CaptureOptions(save_grads=True)
        traced = torchlens.trace(model, list(call.args), capture=wanted)
        traced.log_backward(call.loss(traced.reconstruct_output()))
        return traced

    def values(self, model: nn.Module, names: list[str], call: Call) -> Any:
        import torchlens

        call.plainly_of(model)
        traced = torchlens.trace(model, list(call.args))
        return {name: traced.modules[name].out for name in names}

    def edit(self, model: nn.Module, name: str, change: Change, call: Call) -> Any:
        import torchlens

        def edited(value: Any, *, hook: Any) -> Any:
            return change(value)

        call.plainly_of(model)
        traced = torchlens.trace(model, list(call.args), intervene=torchlens.when(torchlens.module(name), edited))
        return call.loss(traced.reconstruct_output())


class Captum(Peer):
    """Attribution methods that return a layer's activation and its gradient."""

    name, module, package = "captum", "captum.attr", "captum"

    def value(self, model: nn.Module, name: str, call: Call) -> Any:
        from captum.attr import LayerActivation

        given = call.plainly_of(model)
        return LayerActivation(model, model.get_submodule(name)).attribute(given)

    def values(self, model: nn.Module, names: list[str], call: Call) -> Any:
        from captum.attr import LayerActivation

        given = call.plainly_of(model)
        return LayerActivation(model, [model.get_submodule(name) for name in names]).attribute(given)

    def gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        return self._gradient(model, name, call, of_input=False)

    def input_gradient(self, model: nn.Module, name: str, call: Call) -> Any:
        return self._gradient(model, name, call, of_input=True)

    @staticmethod
    def _gradient(model: nn.Module, name: str, call: Call, *, of_input: bool) -> Any:
        from captum.attr import LayerGradientXActivation

        given = call.plainly_of(model)

        def forward(*args: torch.Tensor) -> Any:
            return call.loss(model(*args)).reshape(1)  # Captum expects one output for each example.

        method = LayerGradientXActivation(forward, model.get_submodule(name), multiply_by_inputs=False)
        found = method.attribute(given, attribute_to_layer_input=of_input)
        return found[0] if isinstance(found, tuple) else found  # One for each argument; the first one is needed.


PEERS: dict[str, Peer] = {peer.name: peer for peer in (NNsight(), TransformerLens(), TorchLens(), Captum())}
PACKAGES = {
    "nnsight": ("nnsight", ("nnsight==0.8.1",)),
    "TransformerLens": ("transformer_lens", ("transformer-lens==4.3.0",)),
    "torchlens": ("torchlens", ("torchlens==2.36.1", "transformers")),
    "captum": ("captum", ("captum==0.9.0",)),
}
"""The environment of each library, and its packages. A benchmark of the same library uses the same environment."""


def tool_called(name: str) -> Tool:
    """Return a tool by its name. Raise ``Unable`` if there is none."""
    found = TOOLS.get(name) or PEERS.get(name)
    if found is None:
        raise Unable(name)
    return found
