"""``th.splice``: run dictionaries in the stream of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

import tenterhook.compiled.engine_api  # noqa: F401 - registers the support for compiled models
from tenterhook._tree import tensors
from tenterhook.address import Point, Site, resolve
from tenterhook.address.meanings import Beside, give_meanings, take_meanings
from tenterhook.address.walk import walk
from tenterhook.engine.action import Action, Binding, Context
from tenterhook.engine.session import Session
from tenterhook.errors import ModelChanged, SpliceError
from tenterhook.pytorch.module_calls import children_of
from tenterhook.pytorch.wrappers import unwrapped, wrapped_name, wrappers_of
from tenterhook.sites.module import argument
from tenterhook.splice.spliced_module import Splice, SplicedModule, spliced_module

__all__ = ["Splicing", "splice"]

SITES = (Site.RETURN, Site.IN, Site.ARGUMENT)
NOT_HERE = "{address!r}: a dictionary stands at the output of a module or at one of its arguments, in every call."
NO_DICTIONARY = (
    "at {address!r}: a dictionary is an nn.Module with encode() and decode(); got {given}. th.load_dictionary(folder) "
    "reads the files of SAELens, sparsify and dictionary_learning."
)
ROOT = "the output of the whole model has no place for a dictionary: give a module inside it, such as {first!r}"
REPLACED = (
    "the module {path!r} was replaced or removed after this session was made; make the session again with "
    "th.splice(...)"
)
TWICE = "there is a dictionary at {path!r} already; a module has one at a time"
DEVICE = "at {address!r}: the dictionary is on {one}, and the module on {other}. Move it: dictionary.to({other!r})"


Slot = tuple[nn.Module, str, nn.Module]
"""a module, the name of a child, and the child"""


class Mount(NamedTuple):
    """A dictionary, the point where its output goes, and the point of its input if that is another one.

    ``seen`` holds the value of that point until the dictionary reads it.
    """

    point: Point
    source: Point | None
    dictionary: nn.Module
    seen: dict[str, Tensor]


def splice(model: nn.Module, dictionaries: Mapping[Any, nn.Module], *, error: bool = False) -> Splicing:
    """Run dictionaries in the stream of a model: encode the value at a point, and go on with the reconstruction.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    >>> sae = th.Dictionary(4, 16, kind="topk", k=3)
    >>> with th.splice(model, {"0": sae}, error=True), th.record(model, "0@latents") as tape:
    ...     output = model(torch.ones(2, 4))
    >>> tape["0@latents"].shape, torch.equal(output, model(torch.ones(2, 4)))
    (torch.Size([2, 16]), True)

    While the session is open, ``h.6@latents``, ``h.6@latents[712]`` and, with ``error=True``, ``h.6@error`` are points
    of the model. ``h.6`` is the value that the dictionary encodes.

    Args:
        model: any ``nn.Module``.
        dictionaries: a dict of address to dictionary: any module with ``encode`` and ``decode``. If it has a method
            ``skip`` or a weight ``W_skip``, that part of its input is added. For a transcoder, the
            key is the pair of its input point and its output point, such as ``("h.6.ln_2", "h.6.mlp")``.
        error: whether to add the difference between the value and its reconstruction. The outputs of the model are then
            bitwise those without the dictionaries, until latents or errors are edited.

    Returns:
        A session that is not open yet. Use it as a context manager, or call ``.start()`` and ``.close()``.

    Raises:
        SpliceError: an object is not a dictionary, or does not fit at its point. Widths are checked in the first run.
        AddressError: a point is not in the model.
        NeverReached: when the session ends, if the model ran and a module with a dictionary did not.
    """
    given: Any = dictionaries
    if not isinstance(given, Mapping) or not given:
        raise SpliceError(f"give a dict of address to dictionary, such as {{'h.6': sae}}; got {dictionaries!r:.80}")
    return Splicing(model, [_place(model, key, given) for key, given in dictionaries.items()], error=error)


class Splicing(Session):
    """A session that runs dictionaries in the stream. :func:`splice` creates it."""

    verb = "splice"

    def __init__(self, model: nn.Module, places: list[Mount], *, error: bool) -> None:
        reads = [Binding(place.source, _Reads(place.seen)) for place in places if place.source is not None]
        self._whole = _Returned()
        whole = Binding(Point(":return", Site.RETURN, model, "", explicit=True), self._whole)
        super().__init__(model, [*reads, whole], [])
        self._places, self._error = places, error
        self._slots: list[tuple[nn.Module, str, nn.Module, SplicedModule]] = []
        self._named: list[nn.Module] = []

    def _wants_inside(self, path: str, layer: nn.Module) -> bool:
        # An encoder on its fast path may give its layers nested tensors, which no dictionary can encode.
        inside = f"{path}." if path else ""
        return super()._wants_inside(path, layer) or any(
            place.point.module is not layer and place.point.path.startswith(inside) for place in self._places
        )

    def on_start(self) -> None:
        super().on_start()
        for place in self._places:
            self._mount(place)

    def _mount(self, place: Mount) -> None:
        point = place.point
        host = unwrapped(point.module)
        slots = _slots(self.model, host)
        if not slots and host is not unwrapped(self.model):
            raise ModelChanged(REPLACED.format(path=point.path))
        if not slots:
            first = next((path for path, _ in walk(self.model)[0] if path), "0")
            raise SpliceError(ROOT.format(first=first))
        if any(isinstance(each, SplicedModule) for _, _, child in slots for each in wrappers_of(child)):
            raise SpliceError(TWICE.format(path=point.path))
        given = (
            None if point.site is Site.RETURN else argument(host, point.name if point.site is Site.ARGUMENT else None)
        )
        spliced = spliced_module(slots[0][2], Splice(place.dictionary, point.address, error=self._error), given)
        if place.source is not None:
            spliced.read_from(place.source.address, place.seen)
        self.required.append([Binding(_output(point), spliced.calls)])
        self._named.append(host)
        give_meanings(host, _meanings(spliced))
        for parent, name, child in slots:
            self._slots.append((parent, name, child, spliced))  # First, so that an interrupt still undoes it.
            children_of(parent)[name] = spliced

    def missed(self) -> list[list[Binding]]:
        # A session without a whole run, such as one that lists points, misses nothing.
        return super().missed() if self._whole.reached else []

    def on_close(self) -> None:
        while self._slots:
            parent, name, child, spliced = self._slots[-1]
            if children_of(parent).get(name) is spliced:
                children_of(parent)[name] = child
            self._slots.pop()
        while self._named:
            take_meanings(self._named.pop())
        for place in self._places:
            place.seen.clear()
        super().on_close()


class _Reads(Action):
    """An action that stores the input of a transcoder."""

    observes = True
    again = True

    def __init__(self, seen: dict[str, Tensor]) -> None:
        self._seen = seen

    def __call__(self, value: Any, context: Context) -> None:
        self._seen.pop(context.address, None)
        for _, tensor in tensors(value):
            self._seen[context.address] = tensor.clone()  # The model may write into its own before it is read.
            return


class _Returned(Action):
    """An action that notes that the model has run to its end."""

    observes = True
    compiled = "nothing"
    reached = False

    def __call__(self, value: Any, context: Context) -> None:  # noqa: ARG002  # named as in the protocol
        self.reached = True


def _output(point: Point) -> Point:
    """Return the output of the module of a point."""
    return Point(point.path, Site.RETURN, point.module, point.path, explicit=True)


def _meanings(spliced: SplicedModule) -> dict[str, Beside]:
    below = spliced.name_of_splice
    inner = getattr(spliced, below)
    found = {"latents": Beside(f"{below}.latents", inner.latents, call="whole")}
    return found | ({"error": Beside(f"{below}.error", inner.error)} if hasattr(inner, "error") else {})


def _slots(model: nn.Module, host: nn.Module) -> list[Slot]:
    """Return each parent of a module that is no wrapper, with the name and the child, which may be a wrapper of it."""
    found: list[Slot] = []
    seen, waiting = {id(model)}, [model]
    while waiting:
        parent = waiting.pop()
        for name, child in children_of(parent).items():
            if child is None:
                continue
            below = children_of(child)
            if (child is host or (below and unwrapped(child) is host)) and wrapped_name(parent) is None:
                found.append((parent, name, child))
            if below and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return found


def _place(model: nn.Module, key: Any, dictionary: Any) -> Mount:
    pair = isinstance(key, tuple) and len(key) == 2  # noqa: PLR2004
    point = _point(model, key[1] if pair else key)
    if not isinstance(dictionary, nn.Module) or not all(
        callable(getattr(dictionary, name, None)) for name in ("encode", "decode")
    ):
        given = f"a {type(dictionary).__name__}" if isinstance(dictionary, nn.Module) else f"{dictionary!r:.40}"
        raise SpliceError(NO_DICTIONARY.format(address=point.address, given=given))
    devices = [next((str(each.device) for each in one.parameters()), "") for one in (dictionary, point.module)]
    if all(devices) and devices[0] != devices[1]:
        raise SpliceError(DEVICE.format(address=point.address, one=devices[0], other=devices[1]))
    source = _point(model, key[0], reads=True) if pair else None
    return Mount(point, None if source is None or source == point else source, dictionary, {})


def _point(model: nn.Module, key: Any, *, reads: bool = False) -> Point:
    points = resolve(model, [key])
    if len(points) != 1:
        raise SpliceError(f"{key!r:.80} selects {len(points)} points; a dictionary stands at one")
    point = points[0]
    if point.call is not None or (not reads and point.site not in SITES) or point.site is Site.PARAMETER:
        raise SpliceError(NOT_HERE.format(address=str(point)))
    return point
