"""Per-example gradients from one forward and one backward pass.

The input of each layer and the gradient of its output are recorded. Both have the examples in front, so the gradient of
a weight is known for each example before it is summed. Attention and recurrent layers run again; see ``_per_example``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

import tenterhook as th
from tenterhook._text import counted
from tenterhook.recipes import _inputs as given
from tenterhook.recipes._figures import Pictured, new_figure
from tenterhook.recipes._layers import BATCH_NORMS
from tenterhook.recipes._per_example import WHOLE, Arguments, arguments_of, whole_gradients

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SampleGradients", "per_sample_gradients"]

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MIXING = BATCH_NORMS


@dataclass(frozen=True, eq=False, repr=False)
class SampleGradients(Pictured):
    """Per-example gradients.

    ``grads[name]`` is ``[examples, *shape of the parameter]``. ``losses`` has the loss of each example.
    """

    grads: dict[str, Tensor]
    losses: Tensor

    @property
    def norms(self) -> Tensor:
        """The norm of each example's gradient over all parameters."""
        squares = [grad.flatten(1).double().square().sum(1) for grad in self.grads.values()]
        return torch.stack(squares).sum(0).sqrt()

    def show(self) -> Figure:
        """Return a matplotlib figure of the loss of each example against the norm of its gradient."""
        figure = new_figure(4.6, 3.2)
        axes = figure.add_subplot()
        axes.scatter(self.losses.tolist(), self.norms.tolist(), s=8)
        axes.set(xlabel="loss", ylabel="length of the gradient", title=counted(len(self.losses), "example"))
        return figure

    def __repr__(self) -> str:
        norms = self.norms
        size = f"length {float(norms.min()):.3g} to {float(norms.max()):.3g}"
        return (
            f"gradients of {counted(len(self.losses), 'example')}, {counted(len(self.grads), 'parameter')} each, {size}"
        )


def per_sample_gradients(model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor]) -> SampleGradients:
    """Return the gradient of each example's loss with respect to every parameter that requires a gradient.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> found = th.recipes.per_sample_gradients(model, torch.randn(5, 4), lambda out: out[:, 0].square())
    >>> found.grads["0.weight"].shape, found.norms.shape
    (torch.Size([5, 8, 4]), torch.Size([5]))

    The ``.grad`` of the parameters is not changed. The gradient of a layer that is used several times, and of a weight
    that several layers share, is the sum over all uses.

    Args:
        model: any ``nn.Module`` with layers that treat the examples, the first dimension, independently.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        loss: a function from the output to one number for each example.

    Returns:
        A :class:`SampleGradients`.

    Raises:
        RecipeError: a layer mixes the examples, or cannot be differentiated for each example.
    """
    layers = _layers(model)
    args, kwargs = given.arguments(inputs)
    count = _count(args, kwargs)
    points = [_address(model, module, site, glob=True) for module in layers.values() for site in ("in", "return")]

    def spread(value: Any) -> Any:
        shared = isinstance(value, Tensor) and value.dim() and value.shape[0] == 1 < count
        return value.expand(count, *value.shape[1:]).clone() if shared else None

    # A value that all examples share, such as position embeddings, is copied for each, so that each has its gradient.
    held = {id(module) for module in layers.values()}
    changes = {lambda _name, module: id(module) in held: spread}
    session = th.record(model, points, grad=True)  # A list of globs: a layer that is never called is no error.
    with torch.enable_grad(), arguments_of(layers) as calls, th.edit(model, changes, check=False), session as tape:
        losses = _checked(loss(model(*args, **kwargs)), count)
        tape.backward(losses.sum())
    return SampleGradients(_gathered(model, layers, tape, calls, count), losses.detach())


def _gathered(
    model: nn.Module, layers: dict[str, nn.Module], tape: Any, calls: Arguments, count: int
) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for name, module in layers.items():
        gave, took = (_address(model, module, site) for site in ("return", "in"))
        for call, (took_in, gave_out) in enumerate(zip(tape.calls(took), tape.calls(gave), strict=True)):
            if f"{gave}#{call}" not in tape.grad:
                continue  # The loss does not depend on this call.
            slope = tape.grad[f"{gave}#{call}"]
            if module in calls:
                made = whole_gradients(module, name, calls[module][call], gave_out, slope, count)
            else:
                made = _gradients(module, name, *(_examples(each, name, count) for each in (took_in, gave_out, slope)))
            for own, value in made.items():
                full = names[id(module.get_parameter(own))]
                found[full] = found[full] + value if full in found else value
    return {name: found[name] for name in names.values() if name in found}


def _gradients(module: nn.Module, name: str, x: Tensor, y: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Return the gradient of each of a layer's own parameters, for every example."""
    wanted = {own: p for own, p in module.named_parameters(recurse=False) if p.requires_grad}
    if type(module) is nn.Linear:
        made = {"weight": lambda: torch.einsum("n...o,n...i->noi", g, x), "bias": lambda: _summed(g)}
        return {own: made[own]() for own in wanted}
    if type(module) is nn.Embedding and not module.scale_grad_by_freq and module.max_norm is None:
        return {"weight": _embedded(module, x, g)}
    return _by_vmap(module, name, wanted, x, y, g)


def _summed(grad: Tensor) -> Tensor:
    return grad.flatten(1, -2).sum(1) if grad.dim() > 2 else grad  # noqa: PLR2004


def _embedded(module: nn.Embedding, x: Tensor, g: Tensor) -> Tensor:
    rows = x.flatten(1)
    found = g.new_zeros(len(x), *module.weight.shape)
    index = rows[..., None].expand(*rows.shape, g.shape[-1])
    found.scatter_add_(1, index, g.reshape(*rows.shape, -1))
    if module.padding_idx is not None:
        found[:, module.padding_idx] = 0
    return found


def _by_vmap(
    module: nn.Module, name: str, wanted: dict[str, nn.Parameter], x: Tensor, y: Tensor, g: Tensor
) -> dict[str, Tensor]:
    """Differentiate the layer again, for all examples at once.

    Unless the layer is a known class of PyTorch, its output is checked against the recorded one.
    """
    own = {key: parameter.detach() for key, parameter in wanted.items()}

    def run(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(module, parameters, (one[None],))[0]  # type: ignore[no-any-return]

    def pull(one: Tensor, grad: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        made: Any = vjp(lambda parameters: run(parameters, one), own)
        return made[1](grad)[0], made[0]

    try:
        with torch.no_grad():  # vjp still differentiates; this avoids an outer graph.
            grads, out = vmap(pull)(x, g)
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        raise th.RecipeError(f"{_cannot(name, module)}\nIt failed with {type(error).__name__}: {error}") from error
    known = type(module) in (*NORMS, *CONVOLUTIONS)
    if not known and (out.shape != y.shape or not torch.allclose(out, y, rtol=1e-3, atol=1e-4)):
        raise th.RecipeError(_cannot(name, module))
    return dict(grads)


def _cannot(name: str, module: nn.Module) -> str:
    return (
        f"{name!r} ({type(module).__name__}) has its own parameters, but its output is not a function of its first "
        "argument for each example, so there is no gradient for each example.\n"
        "Freeze it (requires_grad_(False)), or put its parameters into layers such as nn.Linear."
    )


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with their own trainable parameters. Raise ``RecipeError`` if one mixes examples."""
    found: dict[str, nn.Module] = {}
    within: tuple[str, ...] = ()  # prefixes of layers in WHOLE, whose submodules are skipped
    for name, module in model.named_modules():
        if isinstance(module, WHOLE) and any(p.requires_grad for p in module.parameters()):
            found[name] = module
            within += (f"{name}." if name else "",)
            continue
        if name.startswith(within) or not any(p.requires_grad for p in module.parameters(recurse=False)):
            continue
        if isinstance(module, MIXING) and module.training:
            text = f"{name!r} ({type(module).__name__}) mixes the examples in training mode"
            raise th.RecipeError(f"{text}, so no example has its own gradient. Call model.eval(), or use nn.GroupNorm.")
        found[name] = module
    if not found:
        raise th.RecipeError(f"{type(model).__name__} has no parameter that requires a gradient")
    return found


def _address(model: nn.Module, module: nn.Module, site: str, *, glob: bool = False) -> str:
    """Return the address of a module's first argument or output. As a glob, it need not be reached."""
    (point,) = th.points(model, module)
    path = "" if str(point) == ":return" else str(point)
    if glob and path:
        front, dot, last = path.rpartition(".")
        path = f"{front}{dot}{{{last}}}"
    return f"{path}:in" if site == "in" else path or ":return"


def _count(args: Any, kwargs: Any) -> int:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    raise th.RecipeError("the input has no tensor with the examples in front")


def _examples(value: Any, name: str, count: int) -> Tensor:
    tensor = value if isinstance(value, Tensor) else given.lone(value, name)
    if tensor.dim() and tensor.shape[0] == 1 and count > 1:
        tensor = tensor.expand(count, *tensor.shape[1:])
    if not tensor.dim() or tensor.shape[0] != count:
        text = f"the value at {name!r} is {list(tensor.shape)}, without the {count} examples in front"
        raise th.RecipeError(f"{text}: its gradient cannot be separated by example")
    return tensor


def _checked(losses: Any, count: int) -> Tensor:
    if isinstance(losses, Tensor) and losses.shape == (count,):
        return losses
    got = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    text = f"the loss is one number for each example, [{count}], such as reduction='none' gives; got {got}"
    raise th.RecipeError(text)
