"""One forward and backward pass of a model, after which the model and the random state are as before."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tenterhook._tree import map_tensors, tensors
from tenterhook.pytorch.autograd import post_accumulate_hooks_of
from tenterhook.pytorch.dynamo import has_compiled_anything
from tenterhook.pytorch.module_calls import children_of

__all__ = ["OnePass", "checkpointed", "undisturbed", "without_compiler"]


@dataclass
class OnePass:
    """A call of a model with its inputs, and the loss to differentiate."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backward: bool
    loss: Callable[[Any], Tensor] | None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """copies of the model's buffers, to use in place of its own"""

    def copied(self, *, buffers: bool = True) -> OnePass:
        """Return the same pass with copies of the inputs and the buffers, because a model may write into them."""
        args, kwargs = map_tensors(_copy, (self.args, self.kwargs))
        own = self.model.named_buffers() if buffers else ()
        return replace(self, args=args, kwargs=kwargs, buffers={name: buffer.clone() for name, buffer in own})

    def run(self, between: Callable[[], None]) -> None:
        """Run the pass. ``between`` is called after the forward.

        Gradients are replaced by None for the time of the pass.
        """
        call = _Call(self.model, self, between)
        buffers = {f"model.{name}": buffer for name, buffer in self.buffers.items()}
        with contextlib.nullcontext() if self.backward else torch.no_grad():
            torch.func.functional_call(call, buffers, ()) if buffers else call()

    def scalar(self, output: Any) -> Tensor | None:
        """Return the scalar to differentiate: the loss, or the sum of all outputs. None if there is no gradient."""
        own = getattr(output, "loss", None) if self.loss is None else self.loss(output)
        found = [own] if isinstance(own, Tensor) else [tensor for _, tensor in tensors(output)]
        parts = [torch.view_as_real(each) if each.is_complex() else each for each in found if each.requires_grad]
        if not parts:
            return None
        return (
            parts[0]
            if len(parts) == 1 and not parts[0].dim()
            else sum((each.sum() for each in parts[1:]), parts[0].sum())
        )


class _Call(nn.Module):
    """It overrides ``__call__`` so that global module hooks do not see this extra call."""

    def __init__(self, model: nn.Module, asked: OnePass, between: Callable[[], None]) -> None:
        super().__init__()
        children_of(self)["model"] = model  # Direct assignment bypasses the global hooks for module registration.
        self._asked, self._between = asked, between

    def __call__(self, *_: Any) -> None:
        """Run the forward, and then the backward."""
        asked = self._asked
        loss = asked.scalar(asked.model(*asked.args, **asked.kwargs))  # The output is free from here on.
        self._between()
        if asked.backward and loss is not None:
            given = [tensor for _, tensor in tensors((asked.args, asked.kwargs))]
            leaves = [tensor for tensor in (*self.parameters(), *given) if tensor.is_leaf and tensor.requires_grad]
            _differentiate(loss, leaves)


def _differentiate(loss: Tensor, leaves: list[Tensor]) -> None:
    if any(post_accumulate_hooks_of(leaf) for leaf in leaves):
        # Such hooks may change the parameters. This function does not run them.
        torch.autograd.grad(loss, leaves, allow_unused=True)
        return
    before = [(leaf, leaf.grad) for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore the random states after the block."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[device.index for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(state)


def without_compiler() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled models run without the compiler."""
    return torch.compiler.set_stance("force_eager") if has_compiled_anything() else contextlib.nullcontext()


@contextlib.contextmanager
def checkpointed(modules: list[nn.Module]) -> Iterator[None]:
    """Run the forward of these modules under activation checkpointing inside the block."""
    before = [(module, vars(module).get("forward")) for module in modules]
    try:
        for module in modules:
            vars(module)["forward"] = _checkpointing(module.forward)
        yield
    finally:
        for module, own in before:
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own


def _checkpointing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
