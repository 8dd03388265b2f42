"""The learning signal: the size of the gradient that reaches each layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes._figures import Pictured, new_figure
from tenterhook.recipes._inputs import floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LayerSignal", "Signal", "learning_signal"]

FAR = 1e3
"""A ratio that is this many times smaller or larger than the median gets a remark."""


@dataclass(frozen=True)
class LayerSignal:
    """The learning signal of one layer.

    ``ratio`` is the norm of the gradient of its parameters divided by the norm of the parameters. It is proportional to
    the relative change of the layer in one step. ``activation`` and ``gradient`` are the root mean squares of its
    output and of the gradient there.
    """

    name: str
    kind: str
    parameters: int
    activation: float
    gradient: float
    weight: float
    weight_gradient: float
    remark: str = ""

    @property
    def ratio(self) -> float:
        """The norm of the parameters' gradient divided by the norm of the parameters."""
        return self.weight_gradient / self.weight if self.weight else math.inf


@dataclass(frozen=True, repr=False)
class Signal(Pictured):
    """The learning signal of each layer, in the order of the model, and the loss."""

    layers: tuple[LayerSignal, ...]
    loss: float

    def __getitem__(self, name: str) -> LayerSignal:
        return next(layer for layer in self.layers if layer.name == name)

    def show(self) -> Figure:
        """Return a matplotlib figure with the ratio of each layer on a logarithmic scale."""
        figure = new_figure(6, 1.2 + 0.24 * len(self.layers))
        axes = figure.add_subplot()
        ratios = [layer.ratio for layer in self.layers]
        colors = ["tab:red" if layer.remark else "tab:blue" for layer in self.layers]
        axes.barh([layer.name for layer in self.layers], ratios, color=colors)
        if any(ratio > 0 for ratio in ratios):
            axes.set_xscale("log")
        axes.invert_yaxis()
        axes.tick_params(labelsize=7)
        axes.set_title("gradient of the parameters / parameters", fontsize=9)
        return figure

    def __repr__(self) -> str:
        names = [printable(layer.name) for layer in self.layers]
        wide = max(map(len, names))
        head = f"{'layer':<{wide}}  {'out':>8}  {'d out':>8}  {'weights':>8}  {'d/w':>8}"
        lines = [
            f"{name:<{wide}}  {each.activation:8.2g}  {each.gradient:8.2g}  {each.weight:8.2g}  {each.ratio:8.2g}"
            + (f"  {each.remark}" if each.remark else "")
            for name, each in zip(names, self.layers, strict=True)
        ]
        return "\n".join([f"learning signal, loss {self.loss:.4g}", head, *lines])


def learning_signal(model: nn.Module, loss: Callable[[], Tensor]) -> Signal:
    """Measure the gradient that reaches each layer with parameters in one backward pass, and mark outliers.

    >>> import torch, tenterhook as th
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid(), torch.nn.Linear(4, 1))
    >>> found = th.recipes.learning_signal(model, lambda: model(torch.ones(8, 4)).square().mean())
    >>> [layer.name for layer in found.layers], found["0"].ratio > 0
    (['0', '2'], True)

    The ``.grad`` of the parameters is not changed.

    Args:
        model: any ``nn.Module``.
        loss: a function that runs the model and returns the loss, one number.

    Returns:
        A :class:`Signal`. A layer has a ``remark`` if it is frozen, is not called, gets no gradient, or has a ratio far
        from the median.

    Raises:
        RecipeError: the model has no parameters, or the loss is not one number with a gradient.
    """
    layers = {name: module for name, module in model.named_modules() if any(True for _ in _own(module))}
    if not layers:
        raise th.RecipeError(f"{type(model).__name__} has no parameters")
    leaves = {own for module in layers.values() for own, _ in _own(module)}
    held = {id(module) for module in layers.values()}
    parameters = [f"**.{{{','.join(sorted(leaves))}}}"]

    def has_own(_name: str, module: nn.Module) -> bool:
        return id(module) in held

    with torch.enable_grad(), th.record(model, has_own, *parameters, grad=True) as tape:
        value: Any = loss()
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            got = f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise th.RecipeError(f"the loss is one number with a gradient; the function returned {got}")
        tape.backward(value)
    rows = [_layer(tape, model, name, module) for name, module in layers.items()]
    return Signal(tuple(_remarked(rows)), float(value.detach()))


def _own(module: nn.Module) -> Any:
    return module.named_parameters(recurse=False)


def _layer(tape: Any, model: nn.Module, name: str, module: nn.Module) -> LayerSignal:
    (point,) = th.points(model, module)
    address, front = str(point), "" if str(point) == ":return" else f"{point}."
    own = dict(_own(module))
    grads = [tape.grad[front + key] for key in own if front + key in tape.grad]
    outs = tape.calls(address)
    flows = [tape.grad[f"{address}#{call}"] for call in range(len(outs)) if f"{address}#{call}" in tape.grad]
    remark = "" if outs else "not called"
    if outs and not any(p.requires_grad for p in own.values()):
        remark = "frozen"
    elif outs and not any(bool(grad.any()) for grad in grads):
        remark = "no gradient"
    return LayerSignal(
        name or ":return", type(module).__name__, sum(p.numel() for p in own.values()),
        _rms(outs), _rms(flows), _length(own.values()), _length(grads), remark,
    )  # fmt: skip


def _remarked(rows: list[LayerSignal]) -> list[LayerSignal]:
    """Return the rows, with a remark where the ratio is far from the median."""
    sound = sorted(row.ratio for row in rows if not row.remark and math.isfinite(row.ratio))
    if not sound:
        return rows
    middle = sound[len(sound) // 2]

    def remark(row: LayerSignal) -> str:
        if not math.isfinite(row.weight_gradient):
            return "not finite"
        return "vanishing" if row.ratio * FAR < middle else "exploding" if row.ratio > middle * FAR else ""

    return [dataclasses.replace(row, remark=row.remark or remark(row)) for row in rows]


def _rms(values: Any) -> float:
    """Return the root mean square of all numbers in some values, or 0 if there are none."""
    flat = [tensor.detach().double().flatten() for value in values for tensor in floats(value)]
    return float(torch.cat(flat).square().mean().sqrt()) if flat else 0.0


def _length(tensors: Any) -> float:
    flat = [tensor.detach().double().flatten() for tensor in tensors]
    return float(torch.cat(flat).norm()) if flat else 0.0
