"""The work with PyTorch's own hooks, written with as little code as possible: the reference for comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def keeping(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Store the output of each named module in a dict; a later call overwrites an earlier one."""
    kept: dict[str, Any] = {}
    handles = [model.get_submodule(name).register_forward_hook(_keep(kept, name)) for name in names]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _keep(kept: dict[str, Any], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        kept[name] = output

    return hook


@contextmanager
def keeping_gradients(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Store the gradient at the output of each named module, with a tensor hook on every output."""
    kept: dict[str, torch.Tensor] = {}
    handles = [model.get_submodule(name).register_forward_hook(_keep_gradient(kept, name)) for name in names]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _keep_gradient(kept: dict[str, torch.Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def store(gradient: torch.Tensor) -> None:
        kept[name] = gradient

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output).register_hook(store)

    return hook


@contextmanager
def editing(model: nn.Module, name: str, edit: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the output of one module by the result of ``edit``."""
    with model.get_submodule(name).register_forward_hook(lambda _module, _args, output: edit(output)):
        yield


def called(model: nn.Module, call: Callable[[], object]) -> list[str]:
    """Return the names of the modules that a call of the model reaches, including the model's own (``""``)."""
    with keeping(model, [name for name, _ in model.named_modules()]) as kept:
        call()
    return [name for name, _ in model.named_modules() if name in kept]
