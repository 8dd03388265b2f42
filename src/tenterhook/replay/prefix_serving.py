"""Cases of a sweep that run only the last positions of a causal language model.

An edit at position p of a causal model changes nothing before p. So the prefix, up to the first edited position, runs
once, and the model keeps it as its own key-value cache. Each case then runs the positions from there on.

This is used only where the index of each edit shows its positions, and after checks on this model and this input. A run
with other tokens after the prefix must give the same output in the prefix. The unedited input, and some cases of each
edited point, must give the same result as runs of the whole sequence.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import Path, map_tensors, replace_at, tensors
from tenterhook.address import Point
from tenterhook.batch.inputs import InputNames
from tenterhook.edit.change import Change, as_change
from tenterhook.edit.ready import Edit
from tenterhook.edit.skip import Skip
from tenterhook.engine.action import Action, Context
from tenterhook.pytorch.wrappers import unwrapped
from tenterhook.replay.batched_cases import Slices
from tenterhook.replay.cases import Prepared
from tenterhook.replay.growing_batch import apart
from tenterhook.replay.prefix_cache import repeated_cache

__all__ = [
    "CACHE",
    "FEWEST",
    "IDS",
    "SHARE",
    "EditedRows",
    "Late",
    "NotCausal",
    "Packing",
    "PrefixInputs",
    "RowEdits",
    "RowRange",
    "Shapes",
    "by_case",
    "changed_before",
    "each_case",
    "late_cases",
    "one_case",
    "prefixes",
    "some_cases",
    "takes_tokens",
    "with_prefix",
]

FEWEST = 8  # Cases; with fewer, the extra runs cost more than they save.
SHARE = 4  # Only the last quarter of a sequence is worth it: for earlier positions, other cases share more.
CACHE, USE_CACHE = "past_key_values", "use_cache"
IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
PATTERNS = {"pattern", "scores"}


class NotCausal(Exception):
    """Cases cannot run from a later position. The text has the reason."""


class Shapes(Action):
    """An action that remembers the value's shape in the unedited run."""

    reached = True

    def __init__(self) -> None:
        self.calls = 0
        self.of: dict[Path, torch.Size] = {}

    def __call__(self, value: Any, context: Context) -> None:  # noqa: ARG002  # named as in the protocol
        self.calls += 1
        self.of = {path: tensor.shape for path, tensor in tensors(value)}


@dataclass(slots=True)
class Late:
    """A case whose edits touch no position before ``start``, with the place of positions in each edited value."""

    case: Prepared
    start: int
    places: list[tuple[Path, int]]
    kind: Any
    """The edited tensors. Cases of the same kind have one action for all of them."""


# -- which cases -------------------------------------------------------------------------------------------------------


def late_cases(cases: Sequence[Prepared], shapes: dict[Point, Shapes], length: int) -> tuple[list[Late], str]:
    """Return the cases that edit late positions only, and the reason why others do not."""
    late: list[Late] = []
    reason = ""
    known: dict[Any, Any] = {}
    for case in cases:
        try:
            late.append(_late(case, shapes, length, known))
        except NotCausal as error:
            reason = reason or f"case {case.index} ({case.case}): {error}"
    if not late:
        return [], reason
    if len(late) < FEWEST:
        return [], f"fewer than {FEWEST} cases edit only the last quarter of the positions"
    return late, reason


def _late(case: Prepared, shapes: dict[Point, Shapes], length: int, known: dict[Any, Any]) -> Late:
    """Return a case with its first position. ``known``: the dimensions of positions that earlier cases needed."""
    start, places = length, list[tuple[Path, int]]()
    kind: Any = case.key
    for point, changes in case.edits:
        key = (id(point), *[change.part for change in changes])
        if key not in known:
            known[key] = _position_of(point, shapes, length, changes)
        path, place, size = known[key]
        for change in changes:
            if isinstance(change.call, Skip) or not isinstance(change.call, Edit):
                raise NotCausal(f"{change.name} at {point} does not say which positions it changes")
            start = min(start, _first(change.call.at, place, size, length))
        places.append((path, place))
        kind = (kind, path)
    if length - start > length // SHARE:
        raise NotCausal(f"it edits position {start} of {length}, and only the last quarter is worth it")
    return Late(case, start, places, known.setdefault(kind, kind))


def _position_of(
    point: Point, all_shapes: dict[Point, Shapes], length: int, changes: list[Change]
) -> tuple[Path, int, int]:
    """Return the tensor of a value that is edited, its dimension of positions, and how many dimensions it has."""
    if point not in all_shapes:
        raise NotCausal(f"it edits the parameter {point}")
    shapes = all_shapes[point]
    parts = {part if part is None or isinstance(part, tuple) else (part,) for part in [one.part for one in changes]}
    found = [path for path, shape in shapes.of.items() if len(shape) > 1 and (path in parts or parts == {None})]
    if shapes.calls != 1 or len(found) != 1:
        raise NotCausal(f"{point} has no single value with positions")
    shape = shapes.of[found[0]]
    # A pattern is [batch, head, query, key], and that of one head has no dimension for heads.
    place = len(shape) - 2 if point.meaning in PATTERNS else 1
    if shape[place] != length:
        raise NotCausal(f"the value at {point} has the shape {list(shape)}, without the {length} positions")
    return found[0], place, len(shape)


def _first(index: Any, place: int, size: int, length: int) -> int:
    """Return the first position that an index selects."""
    if type(index) is tuple and len(index) > place and {*map(type, index)} <= {int, slice}:
        part = index[place]
        if type(part) is int:
            return part + length if part < 0 else part
        return _bounds(part, length)[0]
    return _bounds(_all_parts(index, size)[place], length)[0]


def _all_parts(index: Any, size: int) -> list[Any]:
    """Return the part of an index for each of ``size`` dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    at = len(parts)
    for number, part in enumerate(parts):
        if part is Ellipsis:
            at = number
        elif part is None or isinstance(part, (bool, Tensor, list)):
            raise NotCausal("an index of numbers and slices shows its positions, and this one has other parts")
    return [*parts[:at], *[slice(None)] * (size - len(parts) + (at < len(parts))), *parts[at + 1 :]]


def _bounds(part: Any, length: int) -> tuple[int, int, int]:
    """Return the first position, the end and the step of a part of an index."""
    if isinstance(part, slice):
        start, stop, step = part.indices(length)
        if step < 1:
            raise NotCausal("a slice with a negative step does not fit")
        return start, stop, step
    first = int(part) + length if int(part) < 0 else int(part)
    return first, first + 1, 0


# -- their edits, from a later position on -----------------------------------------------------------------------------


def shifted(change: Change, place: int, shape: torch.Size, start: int) -> Change:
    """Return the same change for a value that has the positions from ``start`` on."""
    edit: Any = change.call
    parts = _all_parts(edit.at, len(shape))
    first, stop, step = _bounds(parts[place], shape[place])
    parts[place] = slice(first - start, stop - start, step) if step else first - start
    given = getattr(edit, edit.operand) if edit.operand is not None else None
    more: dict[str, Any] = {}
    if (
        isinstance(given, Tensor)
        and given.shape == shape
        and given.shape != torch.empty(shape, device="meta")[edit.at].shape
    ):
        more[edit.operand] = given[edit.at]  # It has the shape of the whole value, and the index applies to it too.
    return as_change(replace(edit, at=tuple(parts), part=None, **more))


@dataclass(frozen=True, slots=True)
class Packing:
    """A batch of ``whole`` sequences, followed by rows that each hold the last positions of several of ``cases``.

    A mask lets each of these cases see the prefix and itself only. So a batch of a few rows has hundreds of cases, and
    the prefix is not copied for each.
    """

    start: int
    length: int
    cases: int
    whole: int

    @property
    def width(self) -> int:
        """The number of positions of a case."""
        return self.length - self.start

    @property
    def each(self) -> int:
        """The number of cases in a row."""
        return self.length // self.width

    @property
    def rows(self) -> int:
        """The number of all rows."""
        return self.whole + -(-self.cases // self.each)

    def joined(self, whole: Tensor, late: Tensor) -> Tensor:
        """Return a batch of one row of each kind, repeated."""
        rest = whole.dim() - 1
        return torch.cat([whole.repeat(self.whole, *[1] * rest), late.repeat(self.rows - self.whole, *[1] * rest)])

    def late(self, tensor: Tensor) -> Tensor:
        """Return the late positions of a tensor of all rows, with a row for each case. It may be a copy."""
        return tensor[self.whole :, : self.each * self.width].reshape(-1, self.width, *tensor.shape[2:])

    def put_late(self, tensor: Tensor, late: Tensor) -> None:
        """Write a result of :meth:`late` back."""
        if self.each * self.width < self.length:
            part = tensor[self.whole :, : self.each * self.width]
            part.copy_(late.view(part.shape))

    def by_case(self, output: Any) -> tuple[Any, Any]:
        """Return the outputs of the cases and of the whole sequences, as :func:`by_case` does."""

        def late(tensor: Tensor) -> Tensor:
            if tensor.shape[:2] == (self.rows, self.length):
                return self.late(tensor)[: self.cases].unsqueeze(1)
            return tensor.expand(self.cases, *tensor.shape)

        def whole(tensor: Tensor) -> Tensor:
            if tensor.shape[:1] == (self.rows,):
                return tensor[: self.whole].unsqueeze(1)
            return tensor.expand(self.whole, *tensor.shape)

        return map_tensors(late, output), map_tensors(whole, output)


@dataclass(slots=True)
class EditedRows:
    """The rows of a batch that an edit changes, and the tensor: its place in a value, and its whole shape."""

    batch: int
    first: int
    rows: int
    path: Path
    place: int
    shape: torch.Size
    start: int
    packing: Packing | None = None

    def separated(self, tensor: Tensor) -> Tensor | None:
        """Return an edited tensor with a row for each case, or None if it is not that of these cases."""
        expected = [self.rows * self.batch, *self.shape[1:]]
        expected[self.place] -= self.start
        if self.packing is None:
            return tensor if list(tensor.shape) == expected else None
        if self.place != 1 or list(tensor.shape) != [self.packing.rows, *self.shape[1:]]:
            return None
        return self.packing.late(tensor) if self.start else tensor[: self.rows]


class RowEdits(Action):
    """The edits of several cases at one point."""

    observes = False
    again = True
    reached = False

    def __init__(self) -> None:
        self.ranges: list[RowRange] = []

    def __call__(self, value: Any, context: Context) -> Any:
        self.reached = True
        found = {(): value} if type(value) is Tensor else dict(tensors(value))
        new: dict[Path, Tensor | None] = {}
        for each in self.ranges:
            path = each.where.path
            if path not in new:
                new[path] = found[path].clone(memory_format=torch.contiguous_format) if path in found else None
            each.put(new[path], context)
        for path, tensor in new.items():
            value = replace_at(value, path, tensor)
        return value


class RowRange(Slices):
    """The changes of the cases in a range of the rows of a batch, at one point."""

    def __init__(self, changes: list[list[Change]], where: EditedRows) -> None:
        super().__init__(changes, where.batch)
        self.where = where

    def put(self, tensor: Tensor | None, context: Context) -> None:
        """Apply the changes in place."""
        where = self.where
        rows = None if tensor is None else where.separated(tensor)
        # A window of the last keys is another value: an index of keys, or noise, would be another edit.
        if tensor is None or rows is None:
            shown = "no such tensor" if tensor is None else list(tensor.shape)
            raise NotCausal(f"the value at {context.address!r} has {shown} in a batch of later positions")
        first = where.first * where.batch
        self._put_all(rows[first : first + len(self._changes) * self._batch], context)
        if where.packing is not None and where.start:
            where.packing.put_late(tensor, rows)

    def _fitted(self, change: Change) -> Change:
        return shifted(change, self.where.place, self.where.shape, self.where.start)


# -- their inputs ------------------------------------------------------------------------------------------------------


def takes_tokens(model: nn.Module) -> bool:
    """Return whether a model is a language model of transformers."""
    return IDS in InputNames(model)


@dataclass(slots=True)
class PrefixInputs:
    """The inputs of a causal language model, which can be cut at a position."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ids: Tensor
    takes_positions: bool

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PrefixInputs:
        """Return the inputs, or raise NotCausal if the model or its inputs are of another kind."""
        names = InputNames(model)
        config = getattr(unwrapped(model), "config", None)
        if CACHE not in names or getattr(config, "is_encoder_decoder", False):
            raise NotCausal("the model has no key-value cache for its inputs")
        named = {names.positional[place]: given for place, given in enumerate(args) if place < len(names.positional)}
        given = {name: value for name, value in (named | kwargs).items() if value is not None and name != USE_CACHE}
        ids = given.pop(IDS, None)
        if len(args) > len(named) or not isinstance(ids, Tensor) or ids.dim() != 2:  # noqa: PLR2004
            raise NotCausal("the input is not input_ids [batch, positions]")
        length = ids.shape[1]
        for name, value in given.items():
            fits = name in (MASK, POSITIONS) and isinstance(value, Tensor) and value.dim() == 2  # noqa: PLR2004
            if name == CACHE or not (fits or all(length not in part.shape for _, part in tensors(value))):
                raise NotCausal(f"the argument {name} cannot be cut at a position")
        return cls((), given, ids, POSITIONS in names)

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.ids.shape[1]

    def prefix(self, stop: int) -> dict[str, Any]:
        """Return the arguments of a run that fills a cache with the positions before ``stop``."""
        cut = {name: self.kwargs[name][:, :stop] for name in (MASK, POSITIONS) if name in self.kwargs}
        return {**self.kwargs, **cut, IDS: self.ids[:, :stop], USE_CACHE: True}

    def rest(self, start: int, cache: Any, times: int) -> dict[str, Any]:
        """Return the arguments of a run of the positions from ``start`` on, repeated for several cases."""
        given = dict(self.kwargs)
        if POSITIONS in given:
            given[POSITIONS] = given[POSITIONS][:, start:]
        given[IDS] = self.ids[:, start:]
        batch = len(self.ids)
        for name, value in given.items():
            if isinstance(value, Tensor) and value.dim() and len(value) == batch:
                given[name] = value.repeat(times, *[1] * (value.dim() - 1))
        if start:
            own = repeated_cache(cache, batch, times, self.ids.device)  # Each run adds to its own cache.
            given |= {CACHE: own, USE_CACHE: True}
        return given

    def packed(self, packing: Packing, cache: Any) -> dict[str, Any]:
        """Return the arguments of one run of whole sequences, the last with other tokens, and of packed late cases."""
        start, device = packing.start, self.ids.device
        each = torch.arange(self.length, device=device)
        place = start + each % packing.width
        case = each // packing.width
        seen = torch.ones(self.length, start, dtype=torch.bool, device=device)
        late = torch.cat([seen, (case[:, None] == case) & (place[:, None] >= place)], 1)
        whole = torch.cat([~seen, each[:, None] >= each], 1)
        if MASK in self.kwargs:
            keep = self.kwargs[MASK][0] != 0
            late, whole = late & torch.cat([keep[:start], keep[place]]), whole & torch.cat([keep[:start], keep])
        dtype = cache.layers[0].keys.dtype
        mask = torch.zeros(2, *late.shape, dtype=dtype, device=device)
        mask.masked_fill_(~torch.stack([whole, late]), torch.finfo(dtype).min)
        ids = packing.joined(self.ids, self.ids[:, place])
        ids[packing.whole - 1 : packing.whole, start:] = self._other_tokens(start)
        positions = self.kwargs.get(POSITIONS, each[None])
        given = {
            IDS: ids,
            POSITIONS: packing.joined(positions, positions[:, place]),
            MASK: packing.joined(mask[None, :1], mask[None, 1:]),
            CACHE: repeated_cache(cache, 1, packing.rows, device),
        }
        return self.kwargs | given | {USE_CACHE: True}

    def with_perturbed(self, start: int, times: int) -> dict[str, Any]:
        """Return the arguments of runs of the whole sequence. The last one has other tokens from ``start`` on."""
        given = self.rest(0, None, times)
        given[IDS][-len(self.ids) :, start:] = self._other_tokens(start)
        return given

    def _other_tokens(self, start: int) -> Tensor:
        """Return tokens of this input in another order, for the positions from ``start`` on."""
        other = self.ids.roll(1, 1).flip(1)[:, start:]
        return other.where(other != self.ids[:, start:], (other + 1) % (self.ids.max() + 1).clamp(min=2))


def by_case(value: Any, count: int, batch: int) -> Any:
    """Return the output of a batch of cases with a first dimension for the cases in every tensor."""

    def one(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == count * batch:
            return tensor.reshape(count, batch, *tensor.shape[1:])
        return tensor.expand(count, *tensor.shape)  # All cases share it.

    return map_tensors(one, value)


def some_cases(value: Any, places: Sequence[int]) -> Any:
    """Return some cases of a result of :func:`by_case`."""
    return map_tensors(lambda tensor: torch.stack([tensor[place] for place in places]), value)


def each_case(value: Any, count: int) -> list[Any]:
    """Return the output of each case of a result of :func:`by_case`."""
    parts = {id(tensor): tensor.unbind() for _, tensor in tensors(value)}
    return [_part(value, parts, place) for place in range(count)]


def _part(value: Any, parts: dict[int, tuple[Tensor, ...]], place: int) -> Any:
    return map_tensors(lambda tensor: parts[id(tensor)][place], value)


def one_case(value: Any, place: int) -> Any:
    """Return the output of one case of a result of :func:`by_case`."""
    return map_tensors(operator.itemgetter(place), value)


def prefixes(unedited: Any, rest: Any, start: int) -> dict[Path, tuple[Tensor, int]]:
    """Return what belongs before each output of later positions: values of the unedited run, and the dimension.

    ``rest``: a result of :func:`by_case`.
    """
    before, found = dict(tensors(unedited)), dict[Path, tuple[Tensor, int]]()
    for path, own in tensors(rest):
        whole = before.get(path)
        if whole is None or whole.dim() + 1 != own.dim():
            raise NotCausal("the output has another structure without the prefix")
        at = _cut_at(whole, own, start)
        if at is not None:
            found[path] = (whole.narrow(at, 0, start), at)
    return found


def with_prefix(unedited: Any, rest: Any, start: int) -> Any:
    """Return outputs for all positions: those of the unedited run before ``start``, and then those of each case.

    ``rest``: a result of :func:`by_case`, as is the returned value.
    """
    own = dict(tensors(rest))
    for path, (first, at) in prefixes(unedited, rest, start).items():
        joined = torch.cat([first.expand(len(own[path]), *first.shape), own[path]], at + 1)
        rest = replace_at(rest, path, joined)
    return rest


def _cut_at(whole: Tensor, own: Tensor, start: int) -> int | None:
    """Return the dimension of positions in an output, or None if it has none."""
    unequal = [place for place in range(whole.dim()) if whole.shape[place] != own.shape[place + 1]]
    if not unequal:
        return None
    if len(unequal) > 1 or whole.shape[unequal[0]] - own.shape[unequal[0] + 1] != start:
        raise NotCausal(f"an output of shape {list(whole.shape)} has no positions that can be cut")
    return unequal[0]


def changed_before(unedited: Any, perturbed: Any, rest: Any, start: int) -> list[Tensor]:
    """Return whether other tokens from ``start`` on change the output before ``start``, without a wait for the device.

    ``perturbed``: the output with other tokens, and ``rest``: one from ``start`` on, both results of :func:`by_case`
    for one case.

    Raises:
        NotCausal: no output has positions, so that this cannot be seen.
    """
    whole, other, found = dict(tensors(unedited)), dict(tensors(perturbed)), []
    for path, tensor in tensors(rest):
        at = _cut_at(whole[path], tensor, start)
        if at is None:
            continue
        if path not in other or other[path].shape[1:] != whole[path].shape:
            return [torch.ones(1, dtype=torch.bool)]
        found += apart(whole[path].narrow(at, 0, start), other[path][0].narrow(at, 0, start))
    if not found:
        raise NotCausal("the output has no positions, so that the model cannot be shown to be causal")
    return found
