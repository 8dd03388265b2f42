"""The tape: what a session recorded, by address and call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from tenterhook._draw import Drawn, Table
from tenterhook._tree import show_path, tensors
from tenterhook.address import Point, Site, resolve
from tenterhook.address.grammar import Wild, parse
from tenterhook.address.suggest import listed, nearest
from tenterhook.errors import AddressError, AmbiguousCall, NotRecorded, TenterhookError
from tenterhook.pytorch.wrappers import unwrapped
from tenterhook.record.kept_value import read, value
from tenterhook.record.tape_log import SPAN, TapeLog

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tenterhook._look.card import Card
    from tenterhook.record.recorded_gradients import Gradients

__all__ = ["Tape", "TapeView", "Track", "load"]

RETURN = Site.RETURN


def _gone() -> Any:
    """A reference to nothing."""


class Track:
    """Everything that was kept at one point: one entry per call that is still held."""

    # Most tracks keep these as they are: a session on every module makes one for each.
    cleared = False
    site = Site.RETURN.value
    lines: tuple[int, ...] = ()
    source: tuple[str, ...] = ()  # The text of these lines, as it was when the tape was saved.
    where = ""
    numbers: dict[int, int] | None = None  # Of a name with several places: the place of each execution.
    places = 1
    _name: str | None = None

    def __init__(
        self, entries: MutableMapping[int, Any], *, point: Point | None = None, kind: str = "", output_of: Any = None
    ) -> None:
        self.entries = entries
        self._site: Site | None
        if output_of is not None:  # A weak reference to a module.
            self.kind, self._module, self._site = kind, output_of, RETURN
            return
        if point is None:
            self.kind, self.site, self._module, self._site = kind, "", _gone, None
            return
        module, site = point.module, point.site
        self.kind = type(module).__name__
        # Weak, so that a tape does not keep a model alive; it serves to find a point by its other names.
        self._module, self._site = ref(module), site
        if site is not RETURN:
            self.site, self._name = site.value, point.name
            spot = point.spot
            if spot is not None:
                self.lines, self.where, self.places = spot.lines, spot.where, len(spot.places)
                self.numbers = {} if self.places > 1 else None

    def entries_at(self, place: int | None) -> MutableMapping[int, Any]:
        """What was kept at one of several places, counted anew from 0; everything for None."""
        if place is None:
            return self.entries
        wanted = place if place >= 0 else self.places + place
        found = [index for index in sorted(self.entries) if (self.numbers or {}).get(index) == wanted]
        return {count: self.entries[index] for count, index in enumerate(found)}

    def is_at(self, point: Point) -> bool:
        """Whether this is what was kept at ``point``, under whatever name."""
        module = self._module()
        if module is None or self._site is not point.site:
            return False
        if point.site is not Site.PARAMETER:
            return module is point.module and self._name == point.name
        mine = Point("", Site.PARAMETER, module, "", self._name).tensor
        return mine is not None and mine is point.tensor


class TapeView(Mapping[str, Any]):
    """Recorded values by address. Iterating gives addresses that each name one value."""

    _what = "value"

    def __init__(self, model: nn.Module | None = None) -> None:
        self._made: dict[str, Track] = {}
        self._make_tracks: Callable[[dict[str, Track]], None] | None = None
        self._model = ref(model) if model is not None else _gone
        self._aliases: dict[str, str] = {}

    @property
    def _tracks(self) -> dict[str, Track]:
        """The tracks by their addresses, made when somebody asks: most of a large tape is never looked at."""
        make = self._make_tracks
        if make is not None:
            self._make_tracks = None
            make(self._made)
        return self._made

    def make_tracks_later(self, make: Callable[[dict[str, Track]], None]) -> None:
        """Have ``make`` fill in the tracks when they are first asked for."""
        self._make_tracks = make

    def __getitem__(self, address: str) -> Any:
        base, call = self._find(address)
        place = self._place(base, address)
        entries = self._tracks[base].entries_at(place)
        if not entries:
            raise self._nothing(base if place is None else address)
        shown = base if place is None else _without_call(address)
        return self._read(entries[self._choose(shown, entries, call)], address)

    def calls(self, address: str) -> list[Any]:
        """The values of every call that is held, in the order of the calls."""
        base, call = self._find(address)
        if call is not None:
            raise AddressError(f"{address!r} names one call already; ask for the calls of {base!r}")
        entries = self._tracks[base].entries_at(self._place(base, address))
        return [self._read(entries[index], f"{base}#{index}") for index in sorted(entries)]

    def __iter__(self) -> Iterator[str]:
        for base, track in self._tracks.items():
            if len(track.entries) == 1 and 0 in track.entries:
                yield from (base for entry in track.entries.values() if self._held(entry))
            else:
                yield from (f"{base}#{index}" for index in sorted(track.entries) if self._held(track.entries[index]))

    def __len__(self) -> int:
        return sum(self._held(entry) for track in self._tracks.values() for entry in track.entries.values())

    def __contains__(self, address: object) -> bool:
        try:
            base, call = self._find(address)  # type: ignore[arg-type]
        except TenterhookError:
            return False
        entries = self._tracks[base].entries_at(self._place(base, str(address)))
        if call is not None:
            index = self._position(entries, call)
            return index in entries and self._held(entries[index])
        return any(map(self._held, entries.values()))

    def _read(self, entry: Any, address: str) -> Any:
        return read(entry, address)

    def _held(self, _entry: Any) -> bool:
        """Whether there is something to read in an entry."""
        return True

    # -- finding ------------------------------------------------------------------------------------------------------

    def _find(self, address: str) -> tuple[str, int | None]:
        """The track that an address means, by the name it was recorded under or by another name of the same module."""
        if address in self._tracks:
            return address, None
        if isinstance(address, nn.Module):
            return self._at(address), None
        if not isinstance(address, str):
            raise NotRecorded(f"a tape is asked by address, a str; got a {type(address).__name__}: {address!r:.80}")
        parsed = parse(address)
        base = str(replace(parsed, call=None))
        for name in (base, self._aliases.get(base), self._alias(base)):
            if name is not None and name in self._tracks:
                return name, parsed.call
        for name in _of_all_places(base):
            if name in self._tracks and self._tracks[name].numbers is not None:
                return name, parsed.call
        raise self._unknown(address)

    def _place(self, base: str, address: str) -> int | None:
        """The number of the place that an address asks for, where ``base`` was recorded at all of them."""
        if address == base or self._tracks[base].numbers is None:
            return None
        asked, recorded = parse(address).inner[-1:], parse(base).inner[-1:]
        if not asked or not recorded or isinstance(recorded[0].place, int):
            return None
        return asked[0].place if isinstance(asked[0].place, int) else None

    def _at(self, module: nn.Module) -> str:
        """Return the address under which the output of a module was recorded."""
        wanted = Point("", RETURN, unwrapped(module), "")
        found = next((name for name, track in self._tracks.items() if track.is_at(wanted)), None)
        if found is None:
            raise NotRecorded(f"the output of this {type(module).__name__} is not on this tape. Ask by an address.")
        return found

    def _alias(self, base: str) -> str | None:
        model = self._model()
        parsed = parse(base)
        if model is None or parsed.names is None:
            return None
        try:
            meant = resolve(model, base)[0]
        except AddressError:
            return None
        return next((name for name, track in self._tracks.items() if track.is_at(meant)), None)

    def _choose(self, base: str, entries: Mapping[int, Any], call: int | None) -> int:
        if call is None:
            if len(entries) > 1:
                shown = listed([f"{base}#{index}" for index in sorted(entries)])
                fix = f"Ask for one of {shown}, or for all of them with .calls({base!r})."
                raise AmbiguousCall(f"{base!r} was called {len(entries)} times, and each call is held.\n{fix}")
            return min(entries)
        index: int = self._position(entries, call)
        if index not in entries:
            held = listed([f"#{held}" for held in sorted(entries)])
            raise NotRecorded(f"{base}#{call}: no such call is held. Held: {held}.")
        return index

    @staticmethod
    def _position(entries: Mapping[int, Any], call: int) -> int:
        if call >= 0:
            return call
        held: list[int] = sorted(entries)
        return held[call] if -call <= len(held) else -1

    def _unknown(self, address: str) -> TenterhookError:
        names = list(self._tracks)
        near = nearest(address, names)
        lines = [f"{address!r} is not on this tape."]
        if near:
            lines.append(f"Did you mean {listed(near)}?")
        elif names:
            lines.append(f"It has {len(names)} point{'s' * (len(names) != 1)}, such as {listed(names[:3])}.")
        else:
            lines.append("It is empty.")
        return NotRecorded("\n".join(lines))

    def _nothing(self, base: str) -> Exception:
        return NotRecorded(f"{base!r} was asked for, but no call has passed it so far.")


class Tape(Drawn, TapeView):
    """What a session recorded.

    ``tape[address]`` is the value, in the structure that the model produced; ``tape.grad[address]`` its gradient;
    ``tape.calls(address)`` one value per call. A tape is a mapping over everything that it holds, point after point as
    they were selected; :meth:`in_order` gives the same addresses in the order in which the values were produced.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model)
        from tenterhook.record.recorded_gradients import Gradients  # It builds on View, which stands here.

        self.grad = Gradients(self)
        self.log = TapeLog()
        self.script: Any = None  # What th.replay serves from, where it was asked for.
        self.notes: dict[str, Any] = {}
        """what else is known of the run, in plain JSON: ``failure``, ``model``, ``tokens``, ``order``"""

    def where(self, address: str) -> str:
        """File and line where a value inside a ``forward`` was recorded; nothing for other points."""
        view = self.grad if self.gradients_alone else self
        return view._tracks[view._find(address)[0]].where

    @property
    def gradients_alone(self) -> bool:
        """Whether this was recorded with ``values=False``."""
        return not self._tracks and bool(self.grad._tracks)

    def _unknown(self, address: str) -> TenterhookError:
        if not self.gradients_alone:
            return super()._unknown(address)
        return NotRecorded(f"this tape has no values, only gradients (values=False): ask for tape.grad[{address!r}].")

    def in_order(self) -> list[str]:
        """Return the addresses in the order in which their values were produced.

        An output is produced when its call returns, an argument when the call begins, a variable when it is assigned.
        A file from before this order was stored gives the order of iteration.

        >>> import torch, tenterhook as th
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with th.record(model, ":return", "1", "1:in", "0") as tape:
        ...     output = model(torch.ones(1, 2))
        >>> tape.in_order()
        ['0', '1:in', '1', ':return']
        """
        if not self.is_ordered:
            return list(self)
        held: list[tuple[str, Any]] = [(base, track.entries) for base, track in self._tracks.items()]
        single = {entries.base: base for base, entries in held if len(entries) == 1 and 0 in entries}
        names = {entries.base: base for base, entries in held}
        keys = [(key - key % SPAN, key % SPAN) for key in self.log.entries]
        return [single.get(first, f"{names[first]}#{call}") for first, call in keys]

    @property
    def is_ordered(self) -> bool:
        """Whether the order in which the values were produced is known: a file of an earlier version has none."""
        return self.log.ordered

    @property
    def nbytes(self) -> int:
        """The size of what is held, values and gradients, in bytes."""
        kept = (value(entry) for track in self._tracks.values() for entry in track.entries.values())
        return sum(_nbytes(tensor) for held in (*kept, *self.grad.values()) for _, tensor in tensors(held))

    def _let_go(self) -> None:
        """Hold no graph: the session is over."""
        self.log.end()

    def clear(self) -> None:
        """Forget what was recorded so far; an open session goes on recording."""
        for track in (*self._tracks.values(), *self.grad._tracks.values()):
            track.cleared = track.cleared or bool(track.entries)
        self.log.clear()
        for track in self.grad._tracks.values():
            track.entries.clear()

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        *,
        parameters: bool = False,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> Gradients:
        """Compute the gradients of the recorded points, and nothing further back; gives ``tape.grad``.

        >>> import torch, tenterhook as th
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> with th.record(model, "1", grad=True) as tape:
        ...     loss = model(torch.ones(4, 2)).sum()
        >>> tape.backward(loss)["1"].shape, model[0].weight.grad
        (torch.Size([4, 3]), None)

        It works while the session is open and after it, as long as the graph is there. For that a tape holds the places
        in the graph where its gradients arrive. It lets go of each as soon as a backward pass without ``retain_graph``
        comes by, of what such a pass in the session did not reach when the session ends, and of all with :meth:`clear`.
        A later call then goes through the whole graph of its loss, if that is still there.

        Args:
            loss: what to differentiate, one number; or any tensor, with ``gradient``.
            gradient: the gradient of ``loss`` itself, in its shape.
            parameters: run the usual backward pass, which also accumulates into the parameters' ``.grad``.
            retain_graph: keep the graph for another pass; gradients of several passes add up.
            create_graph: keep a graph of the gradients, so that they can be differentiated in turn.
        """
        from tenterhook.record.tape_backward import backward

        backward(self, loss, gradient, parameters=parameters, retain_graph=retain_graph, create_graph=create_graph)
        return self.grad

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tape to one file, whole or not at all: safetensors and plain text, no pickle."""
        from tenterhook.record.tape_file import save  # safetensors is loaded only when it is needed.

        save(self, path)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """One row per value that is held, for whatever draws it."""
        from tenterhook.record.tape_table import table

        return table(self)

    def plot(self, address: str, *, maps: int = 64) -> Figure:
        """A matplotlib figure of one value and its gradient: maps, matrix or line, beside a histogram.

        It needs ``tenterhook[page]``. A value of several tensors has a row for each.
        """
        from tenterhook._look.figure import figure

        track = self._tracks[self._find(address)[0]]
        return figure(self._shown(address), module=track.kind, parameter=track.site == "parameter", maps=maps)

    def look(self, address: str) -> Card:
        """One value that draws itself: its numbers as text, and with its pictures in a notebook."""
        from tenterhook._look.card import Card
        from tenterhook.record.tape_table import table

        self[address]  # Says what is wrong with the address now, not when it is drawn.
        return Card(table(self, [address]), lambda: self.plot(address))

    def _shown(self, address: str) -> list[tuple[str, Tensor]]:
        value, grads = self[address], dict(tensors(self.grad[address])) if address in self.grad else {}
        shown: list[tuple[str, Tensor]] = []
        for path, tensor in tensors(value):
            shown.append((f"{address}{show_path(path)}", tensor))
            if isinstance(grads.get(path), Tensor):
                shown.append((f"grad of {address}{show_path(path)}", grads[path]))
        return shown


def _nbytes(tensor: Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return int(tensor.indices().nbytes + tensor.values().nbytes)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return int(tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes)
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return int(tensor.ccol_indices().nbytes + tensor.row_indices().nbytes + tensor.values().nbytes)
    return int(tensor.nbytes)


def _without_call(address: str) -> str:
    return str(replace(parse(address), call=None))


def _of_all_places(base: str) -> list[str]:
    """The addresses of all places of the name of which ``base`` is one place."""
    parsed = parse(base)
    if not parsed.inner or parsed.inner[-1].place is None:
        return []
    *above, last = parsed.inner
    others = [replace(last, place=place) for place in (None, Wild.ANY) if place is not last.place]
    return [str(replace(parsed, inner=(*above, other))) for other in others]


def load(path: str | os.PathLike[str]) -> Tape:
    """Read a tape that ``tape.save`` wrote. Nothing in the file is run.

    >>> import os, tempfile, torch, tenterhook as th
    >>> model = torch.nn.Linear(2, 2)
    >>> with th.record(model) as tape:
    ...     output = model(torch.ones(1, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tape.save(os.path.join(folder, "run.th"))
    ...     again = th.load(os.path.join(folder, "run.th"))
    >>> torch.equal(again[":return"], output)
    True
    """
    from tenterhook.record import tape_file  # safetensors is loaded only when it is needed.

    return tape_file.load(path)
