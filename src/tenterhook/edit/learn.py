"""``th.learn``: find the tensors of edits by gradient descent. The model itself does not change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._look.progress import bar
from tenterhook._text import counted
from tenterhook._tree import describe, tensors
from tenterhook.edit.ready import Edit, Lowrank, Mask, Project, Rotate
from tenterhook.edit.saved import Edits
from tenterhook.edit.verb import Editing, edit
from tenterhook.errors import EditError
from tenterhook.record.verb import record

__all__ = ["Learned", "learn"]

THREE = 3
UNSTEADY = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.BatchNorm1d, nn.BatchNorm2d,
    nn.BatchNorm3d, nn.SyncBatchNorm,
)  # fmt: skip
COLDEST = 0.1  # The temperature of masks in the last step; it is 1 in the first.
SURE = 0.02  # A mask starts at least this far from 0 and 1, where it would have no gradient.
NOTHING = (
    "{edit!r} at {address!r} has no tensor that can be learned. Give th.rotate(rank=...), th.lowrank(rank=...), "
    "th.mask(torch.ones(...)), or th.add(torch.zeros(...)) and the like, whose tensor is where the search starts."
)
NO_SOURCE = "th.rotate() takes a part of the value from another input: give triples (inputs, source, target) as pairs"
TRAINING = "the model is in training mode: {kind} would make the loss random. Call model.eval() first."
NO_GRADIENT = "no gradient of the loss reaches the edits: loss= uses no differentiable operation on the model's output"


@dataclasses.dataclass(frozen=True)
class Learned:
    """The result of :func:`learn`.

    ``edits``: a dict for ``th.edit`` and ``th.save_edits``. ``losses``: the loss at each step.
    """

    edits: Edits
    losses: tuple[float, ...] = dataclasses.field(repr=False)

    def apply(self, model: nn.Module, source: Any = None) -> Editing:
        """Return a session of ``th.edit`` with the edits. Rotations take their part from a run of ``source``."""
        edits: dict[str, Any] = dict(self.edits)
        rotations = [address for address, each in edits.items() if isinstance(each, Rotate)]
        if source is not None and rotations:
            for address, value in _values(model, rotations, source).items():
                edits[address] = dataclasses.replace(edits[address], value=value)
        return edit(model, edits)

    def __repr__(self) -> str:
        lines = [f"learned in {counted(len(self.losses), 'step')}, loss {self.losses[0]:.4g} → {self.losses[-1]:.4g}"]
        return "\n".join([*lines, *(f"  {address}: {each!r}" for address, each in self.edits.items())])


def learn(  # noqa: PLR0913
    model: nn.Module,
    edits: Mapping[str, Edit],
    pairs: Iterable[tuple[Any, ...]],
    *,
    loss: Callable[[Any, Any], Any],
    steps: int = 300,
    lr: float = 0.02,
    penalty: float = 0.0,
    seed: int = 0,
    progress: bool | None = None,
) -> Learned:
    """Learn the tensors of edits, so that the edited model has a small loss. The model stays as it is.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> x, wanted = torch.randn(16, 4), torch.ones(16, 2)
    >>> found = th.learn(
    ...     model, {"0": th.add(torch.zeros(8))}, [(x, wanted)], loss=torch.nn.functional.mse_loss, progress=False
    ... )
    >>> found.losses[-1] < found.losses[0]
    True

    Args:
        model: any ``nn.Module``. Its parameters need not be frozen: they get no gradient.
        edits: a dict of address to edit. ``th.rotate(rank=4)`` learns a subspace in which the value is taken from
            another input (distributed alignment search), ``th.lowrank(rank=4)`` a low-rank change, ``th.mask`` which
            heads or units to keep. Of other ready edits, the tensor that they have is learned, such as that of
            ``th.add(torch.zeros(768))``.
        pairs: a list of ``(inputs, target)``, or of ``(inputs, source, target)`` for rotations. Inputs are a tensor, a
            tuple of arguments or a dict of keyword arguments, with the examples in rows.
        loss: a function of ``(output, target)`` that returns one number.
        steps: the number of steps of Adam; each uses one of the pairs, in a random order.
        lr: the learning rate.
        penalty: for masks, the weight of the share that is kept in the loss. Masks become 0 or 1.
        seed: the seed of the start and of the order.
        progress: whether to show a progress bar. By default, if standard error is a terminal.

    Returns:
        A :class:`Learned` with the edits.

    Raises:
        EditError: an edit has nothing to learn, or no gradient reaches it.
        AddressError: a point is not in the model.
    """
    given = [_example(each) for each in pairs]
    if not given or not edits:
        raise EditError("nothing to learn: give a dict of edits and a list of (inputs, target)")
    if type(steps) is not int or steps < 1:
        raise EditError(f"steps= is a positive int; got {steps!r:.40}")
    _check_mode(model)
    # The search needs gradients wherever it is called.
    with torch.inference_mode(mode=False), torch.enable_grad():
        generator = torch.Generator().manual_seed(seed)
        shapes = _values(model, list(edits), given[0][0])
        parts = {address: _Part(address, each, shapes[address], generator) for address, each in edits.items()}
        rotations = [address for address, each in edits.items() if isinstance(each, Rotate)]
        if rotations and any(source is None for _, source, _ in given):
            raise EditError(NO_SOURCE)
        optimizer = torch.optim.Adam([each for part in parts.values() for each in part.tensors.values()], lr=lr)
        losses: list[Tensor] = []
        with bar("learn", total=steps, shown=progress) as move:
            for step, place in zip(range(steps), _order(len(given), generator), strict=False):
                heat = COLDEST ** (step / max(steps - 1, 1))
                value = _loss(model, parts, rotations, given[place], loss, heat)
                _descend(optimizer, parts, value + penalty * sum(part.kept(heat) for part in parts.values()))
                losses.append(value.detach())  # Read at the end, so that no step waits for the device.
                move(advance=1)
    made = {address: part.finished() for address, part in parts.items()}
    return Learned(Edits(made), tuple(float(value) for value in losses))


def _loss(
    model: nn.Module, parts: dict[str, _Part], rotations: list[str], example: Any, loss: Any, heat: float
) -> Tensor:
    inputs, source, target = example
    others = _values(model, rotations, source) if rotations else {}
    args, kwargs = _arguments(inputs)
    changes = {address: part.edit(heat, others.get(address)) for address, part in parts.items()}
    with torch.enable_grad(), edit(model, changes):
        value = loss(model(*args, **kwargs), target)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise EditError(NO_GRADIENT if isinstance(value, Tensor) else f"loss= returned {describe(value)}, not a tensor")
    return value.reshape(())


def _descend(optimizer: torch.optim.Optimizer, parts: dict[str, _Part], value: Tensor) -> None:
    leaves = [each for part in parts.values() for each in part.tensors.values()]
    # Not backward(): the parameters of the model get no gradient.
    for leaf, gradient in zip(leaves, torch.autograd.grad(value, leaves, allow_unused=True), strict=True):
        if gradient is None:
            address = next(name for name, part in parts.items() if any(each is leaf for each in part.tensors.values()))
            raise EditError(f"{address!r}: {NO_GRADIENT}")
        leaf.grad = gradient
    optimizer.step()


class _Part:
    """An edit whose tensors are learned."""

    def __init__(self, address: str, given: Edit, value: Tensor, generator: torch.Generator) -> None:
        self._given = given
        self.tensors = {
            name: tensor.detach().clone().requires_grad_()
            for name, tensor in _starts(address, given, value, generator).items()
        }

    def edit(self, heat: float, other: Tensor | None) -> Edit:
        """Return the edit with the tensors as they are now."""
        fields: dict[str, Any] = dict(self.tensors)
        if isinstance(self._given, Mask):
            fields = {"keep": torch.sigmoid(self.tensors["keep"] / heat)}
        return dataclasses.replace(self._given, **fields, **({} if other is None else {"value": other}))

    def kept(self, heat: float) -> Any:
        """Return the share that a mask keeps; 0 for other edits."""
        return torch.sigmoid(self.tensors["keep"] / heat).mean() if isinstance(self._given, Mask) else 0.0

    def finished(self) -> Edit:
        """Return the learned edit, with tensors that need no gradient."""
        fields: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        if isinstance(self._given, Mask):
            fields["keep"] = (fields["keep"] > 0).to(fields["keep"].dtype)
        if isinstance(self._given, Rotate):
            wide = fields["directions"].to(torch.promote_types(fields["directions"].dtype, torch.float32))
            fields["directions"] = torch.linalg.qr(wide.mT)[0].mT.contiguous().to(fields["directions"].dtype)
        return dataclasses.replace(self._given, **fields)


def _starts(address: str, given: Edit, value: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors to learn, where the search starts."""
    size = value.shape[-1]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(value) / math.sqrt(size)

    if isinstance(given, (Rotate, Lowrank)) and given.rank is not None and not 0 < given.rank <= size:
        raise EditError(f"{address!r}: rank= is from 1 to {size}, the size of the value; got {given.rank}")
    if isinstance(given, Rotate):
        start = given.directions if given.directions is not None else random(given.rank or 1, size)
        return {"directions": start}
    if isinstance(given, Lowrank):
        if given.down is not None and given.up is not None:
            return {"down": given.down, "up": given.up} | ({} if given.bias is None else {"bias": given.bias})
        rank = given.rank or 1
        return {"down": random(rank, size), "up": value.new_zeros(rank, size), "bias": value.new_zeros(rank)}
    if isinstance(given, Mask):
        return {"keep": torch.logit(given.keep.clamp(SURE, 1 - SURE))}
    names = ("directions",) if isinstance(given, Project) else (getattr(given, "operand", None),)
    found = {name: getattr(given, name) for name in names if name is not None}
    found = {name: each for name, each in found.items() if isinstance(each, Tensor) and each.is_floating_point()}
    if not found:
        raise EditError(NOTHING.format(edit=given, address=address))
    return found


def _values(model: nn.Module, addresses: list[str], inputs: Any) -> dict[str, Tensor]:
    args, kwargs = _arguments(inputs)
    with torch.no_grad(), record(model, *addresses) as tape:
        model(*args, **kwargs)
    return {address: _tensor(tape[address], address) for address in addresses}


def _tensor(value: Any, address: str) -> Tensor:
    found = [tensor for _, tensor in tensors(value) if tensor.is_floating_point()]
    if len(found) != 1:
        raise EditError(f"the value at {address!r} is {describe(value)}; one floating-point tensor is needed")
    return found[0]


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (given if isinstance(given, tuple) else (given,)), {}


def _example(given: Any) -> tuple[Any, Any, Any]:
    if not isinstance(given, tuple) or len(given) not in (2, THREE):
        raise EditError(f"a pair is (inputs, target), or (inputs, source, target); got {describe(given):.80}")
    return given if len(given) == THREE else (given[0], None, given[1])


def _order(count: int, generator: torch.Generator) -> Iterator[int]:
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _check_mode(model: nn.Module) -> None:
    for module in model.modules():
        if module.training and isinstance(module, UNSTEADY):
            raise EditError(TRAINING.format(kind=type(module).__name__))
