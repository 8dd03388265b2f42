"""A case: a model, its inputs, and a run that can be repeated bit for bit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.values import map_tensors, snapshot, tensors_in

__all__ = ["Case", "NotRunnable", "Run", "run"]

SEED = 7


class NotRunnable(Exception):
    """An error: the model cannot be built or run here, for a reason that is unrelated to tenterhook."""


@dataclass
class Case:
    """A model and its inputs. ``backward`` is False if only values can be compared."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    backward: bool = True


@dataclass
class Run:
    """The result of a run: a snapshot of the output, and the gradients of the parameters."""

    output: Any
    grads: dict[str, Tensor | None]


def run(case: Case) -> Run:
    """Run one forward and one backward pass from fixed seeds. The model and the random generators are restored."""
    with _restored(case.model):
        _seed()
        args, kwargs = map_tensors(_fresh, (case.args, case.kwargs))
        output = case.model(*args, **kwargs)
        loss = _loss(output) if case.backward else None
        kept = snapshot(output)
        if loss is not None:
            loss.backward()
        grads = {name: parameter.grad for name, parameter in case.model.named_parameters()}
    return Run(kept, grads)


def _fresh(tensor: Tensor) -> Tensor:
    """Return a copy of an input tensor, because a model may change its input in place."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _loss(output: Any) -> Tensor | None:
    """Return the sum of all output tensors that require a gradient, or None."""
    total: Tensor | None = None
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            part = real.to_dense().sum() if real.is_sparse else real.sum()
            total = part if total is None else total + part
    return total


def _seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - the generator that models use


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore the buffers, the gradients and the random generators at the end."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])  # noqa: NPY002
        for parameter in model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                old = buffers.get(name)
                same = old is not None and old.shape == buffer.shape and old.dtype == buffer.dtype
                # Writing an equal value would still count as an in-place change.
                if same and not old.equal(buffer):
                    buffer.copy_(old)
