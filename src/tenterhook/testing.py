"""Helpers for tests: toy models that show common problems with hooks, and checks of what a session must not change.

>>> import torch, tenterhook as th
>>> from tenterhook.testing import Residual, untouched
>>> model = Residual()
>>> with untouched(model):
...     with th.record(model, "**") as tape:
...         _ = model(torch.ones(1, 4))
"""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._text import counted
from tenterhook.pytorch.autograd import post_accumulate_hooks_of, tensor_hooks
from tenterhook.pytorch.hook_tables import global_state
from tenterhook.pytorch.module_calls import buffers_of, parameters_of
from tenterhook.sites.module import MISSING

__all__ = ["Attention", "Cell", "Mixed", "Residual", "live_tensors", "no_leak", "state_of", "untouched"]


class Residual(nn.Module):
    """A residual block with an in-place sum and an in-place activation, as in a ResNet."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Apply norm, ReLU and norm, then add the input in place."""
        out = self.norm2(self.relu(self.norm1(x)))
        out += x
        return self.relu(out)  # type: ignore[no-any-return]


class Cell(nn.Module):
    """A recurrent model that calls one module at every step."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.cell = nn.RNNCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Call the cell once for each step of the first dimension."""
        state = torch.zeros_like(x[0])
        for step in x:
            state = self.cell(step, state)
        return state


class Attention(nn.Module):
    """Attention without parameters. Its scores and weights are variables inside ``forward``, not outputs of modules."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention of every position to all others."""
        scores = x @ x.mT / x.shape[-1] ** 0.5
        weights = scores.softmax(-1)
        return weights @ x  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """A model whose submodule takes a keyword argument and returns a structure that contains None."""

    class Part(nn.Module):
        """A module that takes a keyword argument and returns a dict with a tuple in it."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Any]:
            """Return the scaled linear map, and the linear map before scaling."""
            y = self.linear(x)
            return {"y": y if scale is None else y * scale, "rest": (y, None)}

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.part = self.Part(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of both tensors in the submodule's output."""
        found = self.part(x, scale=torch.full_like(x, 2.0))
        return found["y"] * found["rest"][0]  # type: ignore[no-any-return]


@contextlib.contextmanager
def untouched(model: nn.Module, *, rng: bool = True) -> Iterator[None]:
    """Check that the block leaves the model and the process unchanged.

    It compares every module's ``__dict__`` with its hooks, flags and own ``forward``; every parameter and buffer, by
    identity and bit for bit; gradients; hooks on tensors; PyTorch's global hooks and switches; and the random
    generators.

    Args:
        model: the model to check.
        rng: whether to compare the random generators. Use False around code that draws random numbers itself.

    Raises:
        AssertionError: something has changed. The text lists the first ten differences.
    """
    before = state_of(model, rng=rng)
    yield
    after = state_of(model, rng=rng)
    keys = before.keys() | after.keys()
    wrong = [key for key in keys if not _same(before.get(key, MISSING), after.get(key, MISSING))]
    if wrong:
        changes = [(key, before.get(key, MISSING), after.get(key, MISSING)) for key in sorted(wrong)[:10]]
        shown = "\n".join(f"  {key}: {old!r:.120} -> {new!r:.120}" for key, old, new in changes)
        raise AssertionError(f"{counted(len(wrong), 'thing has', 'things have')} changed:\n{shown}")


def state_of(model: nn.Module, *, rng: bool = True) -> dict[str, Any]:
    """Return the state of a model and the process that a session must not change.

    Args:
        model: the model.
        rng: whether to include the state of the random generators.
    """
    state = _process_state()
    if rng:
        state["rng: torch"] = torch.get_rng_state()
        state["rng: python"] = random.getstate()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["rng: cuda"] = torch.cuda.get_rng_state()
    for path, module in model.named_modules(remove_duplicate=False):
        state |= {f"{path or 'the model'}: {key}": value for key, value in _module_state(module).items()}
    return state


def _process_state() -> dict[str, Any]:
    return {
        **global_state(),
        "switch: grad": torch.is_grad_enabled(),
        "switch: inference": torch.is_inference_mode_enabled(),
        "switch: fast path": torch.backends.mha.get_fastpath_enabled(),
        "switch: deterministic": torch.are_deterministic_algorithms_enabled(),
        "class: Tensor.backward": Tensor.backward,
    }


def _module_state(module: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {"class": type(module)}
    for key, value in vars(module).items():
        # Copy containers, to compare their content. Other objects are compared by identity.
        state[key] = dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
        if isinstance(value, dict | list):
            state[f"{key} (object)"] = _Object(value)
    for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
        if tensor is not None:
            state[f"{name} (bits)"] = tensor.detach().clone()
            state[f"{name} (grad)"] = None if tensor.grad is None else tensor.grad.clone()
            state[f"{name} (requires_grad)"] = tensor.requires_grad
            for kind, table in (("hooks", tensor_hooks), ("hooks after accumulation", post_accumulate_hooks_of)):
                hooks = table(tensor)
                state[f"{name} ({kind})"] = None if hooks is None else dict(hooks)
    return state


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(_bits(one), _bits(other)))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_same_inside(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_inside, one, other))
    return one is other or _equal(one, other)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    if isinstance(one, weakref.ref) and isinstance(other, weakref.ref):
        return one() is other()
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # Arrays and similar objects compare element by element.
        return False


def _same_inside(one: Any, other: Any) -> bool:
    """Return whether two items of a container are the same.

    A tensor must be the same object; its bits are compared elsewhere.
    """
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return _same(one, other)


class _Object:
    """The identity of a container, independent of its content."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} at {id(self.value):#x}>"


def _bits(tensor: Tensor) -> Tensor:
    """Return the tensor as bytes, so that NaN equals itself and -0.0 differs from 0.0."""
    plain = tensor.detach().contiguous().cpu()
    return plain.reshape(-1).view(torch.uint8) if plain.numel() and not plain.is_quantized else plain.reshape(-1)


def live_tensors() -> list[Tensor]:
    """Return every tensor that Python still refers to, after a garbage collection."""
    gc.collect()
    # type(), because isinstance() would load lazy proxies among the objects.
    return [found for found in gc.get_objects() if issubclass(type(found), Tensor)]


@contextlib.contextmanager
def no_leak() -> Iterator[None]:
    """Check that no tensor from the block is still alive after it, without a garbage collection.

    Raises:
        AssertionError: some tensors are still alive. The text lists their shapes.
    """
    before = live_tensors()  # Held until the end, so that no new tensor can reuse one of these ids.
    known = {id(tensor) for tensor in before}
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        # Without a collection, so tensors that only a reference cycle keeps alive count as leaked.
        left = [found for found in gc.get_objects() if issubclass(type(found), Tensor) and id(found) not in known]
    finally:
        if enabled:
            gc.enable()
    if left:
        shown = ", ".join(f"{type(found).__name__}{list(found.shape)}" for found in left[:10])
        raise AssertionError(f"{counted(len(left), 'tensor is', 'tensors are')} still alive after the block: {shown}")
