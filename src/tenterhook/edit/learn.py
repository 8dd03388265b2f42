"""``th.learn``: find the tensors of edits by gradient descent. The model itself does not change."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from tenterhook._look.progress import bar
from tenterhook._text import counted
from tenterhook._tree import describe, map_tensors, tensors
from tenterhook.address import Point, resolve
from tenterhook.edit.ready import Edit, Lowrank, Mask, Project, Rotate
from tenterhook.edit.saved import Edits
from tenterhook.edit.verb import Editing, edit
from tenterhook.engine.action import Context
from tenterhook.errors import EditError
from tenterhook.pytorch.layers import BATCH_NORMS, DROPOUTS
from tenterhook.record.tape import Tape
from tenterhook.record.verb import record

__all__ = ["Learned", "learn"]

THREE = 3
COLDEST = 0.1  # The temperature of masks in the last step; it is 1 in the first.
SURE = 0.02  # A mask starts at least this far from 0 and 1, where it would have no gradient.
NOTHING = (
    "{edit!r} at {address!r} has no tensor that can be learned. Give th.rotate(rank=...), th.lowrank(rank=...), "
    "th.mask(torch.ones(...)), or th.add(torch.zeros(...)) and the like, whose tensor is where the search starts."
)
ONE_EDIT = (
    "{address!r} has {given}, and one edit is learned at a point. Give th.rotate(rank=...), th.add(...) or another"
)
TWICE = "{address!r} is selected twice. Give each point one edit."
NO_SOURCE = "th.rotate() takes a part of the value from another input: give triples (inputs, source, target) as pairs"
UNUSED_SOURCE = (
    "the pairs have a source, and no edit takes anything from it: only th.rotate() does. Give pairs (inputs, target)."
)
SEVERAL_CALLS = (
    "{address!r} is called {count} times in a run, and th.rotate() takes its part from one call. Name it: {first!r}, …"
)
TRAINING = "the model is in training mode: {name!r} ({kind}) would {does}. Call model.eval() first."
RANDOM = "the model is in training mode, and its run uses random numbers, as dropout does. Call model.eval() first."
NO_GRADIENT = (
    "no gradient of the loss reaches the edits: loss= uses no differentiable operation on the model's output, or the "
    "model computes under no_grad or in a reentrant checkpoint (use_reentrant=False is right)"
)
NOT_REACHED = (
    "the loss does not depend on the edit at {address!r}: no gradient reaches it. Choose a point before the output "
    "that loss= uses, and look for .detach(), no_grad or a reentrant checkpoint between them."
)
NOT_FINITE = (
    "the search ended without a result: the tensors of {address!r} are not finite. {step}Try a smaller lr=, another "
    "start, or look for NaN in the inputs: th.watch(model) names the first place."
)


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
        if source is not None:
            for address, value in _sources(model, self.edits, source).items():
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
            ``th.add(torch.zeros(768))``. A glob learns an edit for each of its points.
        pairs: ``(inputs, target)``, or ``(inputs, source, target)`` for rotations: a list of these, or a loader that
            ends. Inputs are a tensor, a tuple of arguments or a dict of keyword arguments, with the examples in rows.
        loss: a function of ``(output, target)`` that returns one number.
        steps: the number of steps of Adam; each uses one of the pairs, in a random order.
        lr: the learning rate.
        penalty: for masks, the weight of the share that is kept in the loss. Masks become 0 or 1.
        seed: the seed of the start and of the order.
        progress: whether to show a progress bar. By default, if standard error is a terminal.

    Returns:
        A :class:`Learned` with the edits.

    Raises:
        EditError: an edit has nothing to learn, no gradient reaches it, or the search ends in NaN.
        AddressError: a point is not in the model.
    """
    _check_options(loss, steps, lr)
    # The search needs gradients wherever it is called.
    with torch.inference_mode(mode=False), torch.enable_grad():
        given = [_example(each) for each in pairs]
        if not given or not edits:
            raise EditError("nothing to learn: give a dict of edits and a list of (inputs, target)")
        chosen = _by_point(model, edits)
        _check_sources(chosen, given)
        generator = torch.Generator().manual_seed(seed)
        with _steady(model):
            shapes = _values(model, chosen, given[0][0])
        parts = {address: _Part(model, address, each, shapes[address], generator) for address, each in chosen.items()}
        optimizer = torch.optim.Adam([each for part in parts.values() for each in part.tensors.values()], lr=lr)
        losses: list[Tensor] = []
        with bar("learn", total=steps, shown=progress) as move:
            for step, place in zip(range(steps), _order(len(given), generator), strict=False):
                heat = COLDEST ** (step / max(steps - 1, 1))
                value = _loss(model, parts, chosen, given[place], loss, heat)
                _descend(optimizer, parts, value + penalty * sum(part.kept(heat) for part in parts.values()))
                losses.append(value.detach())  # Read at the end, so that no step waits for the device.
                move(advance=1)
    found = tuple(float(value) for value in losses)
    _check_finite(parts, found)
    return Learned(Edits({address: part.finished() for address, part in parts.items()}), found)


def _loss(
    model: nn.Module, parts: dict[str, _Part], edits: Mapping[str, Edit], example: Any, loss: Any, heat: float
) -> Tensor:
    inputs, source, target = example
    others = _sources(model, edits, source) if source is not None else {}
    args, kwargs = _arguments(inputs)
    changes = {address: part.edit(heat, others.get(address)) for address, part in parts.items()}
    with torch.enable_grad(), edit(model, changes):
        value = loss(model(*args, **kwargs), target)
    if not isinstance(value, Tensor):
        raise EditError(f"loss= returned {describe(value)}, not a tensor")
    if value.numel() != 1:
        raise EditError(f"loss= returned {describe(value)}; one number is needed, such as its .mean()")
    if not value.requires_grad:
        raise EditError(NO_GRADIENT)
    return value.reshape(())


def _descend(optimizer: torch.optim.Optimizer, parts: dict[str, _Part], value: Tensor) -> None:
    leaves = [each for part in parts.values() for each in part.tensors.values()]
    # Not backward(): the parameters of the model get no gradient.
    for leaf, gradient in zip(leaves, torch.autograd.grad(value, leaves, allow_unused=True), strict=True):
        if gradient is None:
            address = next(name for name, part in parts.items() if any(each is leaf for each in part.tensors.values()))
            raise EditError(NOT_REACHED.format(address=address))
        leaf.grad = gradient
    optimizer.step()
    torch.clear_autocast_cache()  # Inside autocast, the next step would use the tensors of the first one.


class _Part:
    """An edit whose tensors are learned.

    They are float32 at least: in float16, Adam divides by zero, and in bfloat16 small steps are lost.
    """

    def __init__(
        self, model: nn.Module, address: str, given: Edit, values: list[Any], generator: torch.Generator
    ) -> None:
        self._given = given
        starts = _starts(address, given, _learned_part(model, address, given, values[0]), generator)
        self._dtypes = {name: tensor.dtype for name, tensor in starts.items()}
        self.tensors = {
            name: tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True).requires_grad_()
            for name, tensor in starts.items()
        }

    def edit(self, heat: float, other: Tensor | None) -> Edit:
        """Return the edit with the tensors as they are now."""
        fields = {"keep": self._shares(heat)} if isinstance(self._given, Mask) else self.tensors
        return self._edit(fields, {} if other is None else {"value": other})

    def _edit(self, fields: Mapping[str, Tensor], more: Mapping[str, Any]) -> Edit:
        made: dict[str, Any] = {name: tensor.to(self._dtypes[name]) for name, tensor in fields.items()}
        return dataclasses.replace(self._given, **made, **more)

    def _shares(self, heat: float) -> Tensor:
        return torch.sigmoid(self.tensors["keep"] / heat)

    def kept(self, heat: float) -> Any:
        """Return the share that a mask keeps; 0 for other edits."""
        return self._shares(heat).mean() if isinstance(self._given, Mask) else 0.0

    def is_finite(self) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in self.tensors.values())

    def finished(self) -> Edit:
        """Return the learned edit, with tensors that need no gradient."""
        fields = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        if isinstance(self._given, Mask):
            fields["keep"] = (fields["keep"] > 0).to(fields["keep"].dtype)
        if isinstance(self._given, Rotate):
            fields["directions"] = torch.linalg.qr(fields["directions"].mT)[0].mT.contiguous()
        return self._edit(fields, {})


def _starts(address: str, given: Edit, value: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors to learn, where the search starts. Their dtypes are those of the learned edit."""
    size = value.shape[-1] if value.dim() else 1

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(value) / math.sqrt(size)

    rank = getattr(given, "rank", None)
    if rank is not None and (type(rank) is not int or not 0 < rank <= size):
        raise EditError(f"{address!r}: rank= is from 1 to {size}, the size of the value; got {rank!r:.40}")
    if isinstance(given, Rotate):
        start = given.directions if given.directions is not None else random(given.rank or 1, size)
        return {"directions": start}
    if isinstance(given, Lowrank):
        if given.down is not None and given.up is not None:
            return {"down": given.down, "up": given.up} | ({} if given.bias is None else {"bias": given.bias})
        count = given.rank or 1
        return {"down": random(count, size), "up": value.new_zeros(count, size), "bias": value.new_zeros(count)}
    if isinstance(given, Mask):
        keep = given.keep if given.keep.is_floating_point() else given.keep.to(value.dtype)
        return {"keep": _logit(keep).to(keep.dtype)}
    names = ("directions",) if isinstance(given, Project) else (getattr(given, "operand", None),)
    found = {name: getattr(given, name) for name in names if name is not None}
    found = {name: each for name, each in found.items() if isinstance(each, Tensor) and each.is_floating_point()}
    if not found:
        raise EditError(NOTHING.format(edit=given, address=address))
    return found


def _logit(keep: Tensor) -> Tensor:
    return torch.logit(keep.to(torch.promote_types(keep.dtype, torch.float32)).clamp(SURE, 1 - SURE))


def _learned_part(model: nn.Module, address: str, given: Edit, value: Any) -> Tensor:
    """Return the part of a value that an edit changes."""
    context = Context(address, 0, model, cast("Any", None))
    tensor = given._tensor(value, context)[1]  # noqa: SLF001
    return tensor if given.at is None else given._cut(tensor, context)


def _values(model: nn.Module, edits: Mapping[str, Edit], inputs: Any) -> dict[str, list[Any]]:
    """Return the values at the points of some edits, one for each call."""
    args, kwargs = _arguments(inputs)
    with torch.no_grad(), record(model, *edits) as tape:
        model(*args, **kwargs)
    return {address: _calls(tape, address) for address in edits}


def _calls(tape: Tape, address: str) -> list[Any]:
    """Return the values of all calls that an address names."""
    is_one = address.rpartition("#")[2].lstrip("-").isdecimal() and "#" in address
    return [tape[address]] if is_one else tape.calls(address)


def _sources(model: nn.Module, edits: Mapping[str, Edit], source: Any) -> dict[str, Tensor]:
    """Return the values in a run of another input from which rotations take their part."""
    rotations = {address: each for address, each in edits.items() if isinstance(each, Rotate)}
    if not rotations:
        return {}
    found = {}
    for address, values in _values(model, rotations, source).items():
        if len(values) > 1:
            first = f"{address.partition('#')[0]}#0"
            raise EditError(SEVERAL_CALLS.format(address=address, count=len(values), first=first))
        context = Context(address, 0, model, cast("Any", None))
        found[address] = rotations[address]._tensor(values[0], context)[1]  # noqa: SLF001
    return found


def _by_point(model: nn.Module, edits: Any) -> dict[str, Edit]:
    """Return the edits by the addresses of their points. A selector may stand for several."""
    if not isinstance(edits, Mapping):
        raise EditError(f"edits are a dict of address to edit, such as {{'h.3': th.rotate(rank=4)}}; got {edits!r:.80}")
    found: dict[Point, tuple[str, Edit]] = {}
    for selector, given in edits.items():
        if isinstance(given, (list, tuple)):
            raise EditError(ONE_EDIT.format(address=str(selector), given=counted(len(given), "edit")))
        if not isinstance(given, Edit):
            raise EditError(NOTHING.format(edit=given, address=str(selector)))
        points = resolve(model, selector if isinstance(selector, str) else [selector])
        for point in points:
            if point in found:
                raise EditError(TWICE.format(address=str(point)))
            # The name as given, because a shared module has several.
            found[point] = selector if isinstance(selector, str) and point.explicit else str(point), given
    return dict(found.values())


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (given if isinstance(given, tuple) else (given,)), {}


def _example(given: Any) -> tuple[Any, Any, Any]:
    if not isinstance(given, (tuple, list)) or len(given) not in (2, THREE):
        raise EditError(
            "a pair is (inputs, target), or (inputs, source, target), and pairs= is a list of them; got "
            f"{describe(given):.80}"
        )
    parts = [_normal(part) for part in given]
    return (parts[0], parts[1], parts[2]) if len(parts) == THREE else (parts[0], None, parts[1])


def _normal(value: Any) -> Any:
    """Return a structure without inference tensors, of which there is no gradient."""
    if not any(tensor.is_inference() for _, tensor in tensors(value)):
        return value
    return map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, value)


def _order(count: int, generator: torch.Generator) -> Iterator[int]:
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_options(loss: Any, steps: Any, lr: Any) -> None:
    if not callable(loss):
        raise EditError(f"loss= is a function of (output, target); got {loss!r:.40}")
    if type(steps) is not int or steps < 1:
        raise EditError(f"steps= is a positive int; got {steps!r:.40}")
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        raise EditError(f"lr= is a positive number; got {lr!r:.40}")


def _check_sources(edits: Mapping[str, Edit], given: list[tuple[Any, Any, Any]]) -> None:
    rotates = any(isinstance(each, Rotate) for each in edits.values())
    if rotates and any(source is None for _, source, _ in given):
        raise EditError(NO_SOURCE)
    if not rotates and any(source is not None for _, source, _ in given):
        raise EditError(UNUSED_SOURCE)


@contextlib.contextmanager
def _steady(model: nn.Module) -> Iterator[None]:
    """Raise if the run inside is that of a model in training mode that is random or changes its statistics."""
    training = {name: module for name, module in model.named_modules() if module.training}
    for name, module in training.items():
        learns = isinstance(module, BATCH_NORMS) and module.track_running_stats
        if learns or (isinstance(module, DROPOUTS) and cast("Any", module).p > 0):
            does = "update its statistics" if learns else "make the loss random"
            raise EditError(TRAINING.format(name=name, kind=type(module).__name__, does=does))
    device = next((each.device for each in model.parameters() if each.is_cuda), None)
    before = _random_state(device) if training else []
    yield
    # Dropout may also be a function that the model calls.
    if not all(map(torch.equal, before, _random_state(device) if training else [])):
        torch.set_rng_state(before[0])
        if device is not None:
            torch.cuda.set_rng_state(before[1], device)
        raise EditError(RANDOM)


def _random_state(device: torch.device | None) -> list[Tensor]:
    return [torch.get_rng_state(), *([] if device is None else [torch.cuda.get_rng_state(device)])]


def _check_finite(parts: Mapping[str, _Part], losses: tuple[float, ...]) -> None:
    for address, part in parts.items():
        if not part.is_finite():
            step = next((place for place, loss in enumerate(losses) if not math.isfinite(loss)), None)
            text = "" if step is None else f"The loss was {losses[step]} at step {step} of {len(losses)}. "
            raise EditError(NOT_FINITE.format(address=address, step=text))
