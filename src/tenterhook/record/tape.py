"""The tape: the recorded values of a session, by address and call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from tenterhook._draw import Drawn, Table
from tenterhook._tree import show_path, tensors
from tenterhook.address import Point, Site, resolve
from tenterhook.address.grammar import CallRange, Wild, parse
from tenterhook.address.suggest import listed, nearest
from tenterhook.errors import AddressError, AmbiguousCall, NotRecorded, TenterhookError
from tenterhook.pytorch.wrappers import unwrapped
from tenterhook.record.kept_value import read, value
from tenterhook.record.tape_log import SPAN, LogEntries, TapeLog

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tenterhook._look.card import Card
    from tenterhook.address.inner_points import InnerPlaces
    from tenterhook.record.recorded_gradients import Gradients

__all__ = ["Tape", "TapeView", "Track", "load"]

RETURN = Site.RETURN
NOT_STARTED = (
    "nothing is recorded, because the session was not started.\n"
    "Write `with th.record(model, ...) as tape:` and call the model inside the block, or call .start() on the session, "
    "run the model, and call .close()."
)


def _gone() -> Any:
    """Return None. It replaces a dead weak reference."""


class Track:
    """The recorded entries of one point: one entry for each call that is kept."""

    # Class attributes, because most tracks use the defaults and a session on every module creates many tracks.
    cleared = False
    site = Site.RETURN.value
    lines: tuple[int, ...] = ()
    source: tuple[str, ...] = ()  # The text of these lines when the tape was saved.
    where = ""
    numbers: dict[int, int] | None = None  # For a name with several places in the source: the place of each execution.
    places = 1
    _name: str | None = None

    def __init__(
        self, entries: MutableMapping[int, Any], *, point: Point | None = None, kind: str = "", output_of: Any = None
    ) -> None:
        self.entries = entries
        self._site: Site | None
        if output_of is not None:  # A weak reference to a module, which `set_place` may refine.
            self.kind, self._module, self._site = kind, output_of, RETURN
            return
        if point is None:
            self.kind, self.site, self._module, self._site = kind, "", _gone, None
            return
        module, site = point.module, point.site
        self.kind = type(module).__name__
        # A weak reference, so that a tape does not keep a model alive. It finds a point by its other names.
        self._module, self._site = ref(module), site
        if site is not RETURN:
            self.set_place(site, point.name, point.spot)

    def set_place(self, site: Site, name: str | None, spot: InnerPlaces | None) -> None:
        """Set the argument, the parameter or the variable that this track records at its module."""
        self._site, self.site, self._name = site, site.value, name
        if spot is not None:
            self.lines, self.where, self.places = spot.lines, spot.where, len(spot.places)
            self.numbers = {} if self.places > 1 else None

    def entries_at(self, place: int | None) -> MutableMapping[int, Any]:
        """Return the entries of one of several places, numbered from 0, or all entries if ``place`` is None."""
        if place is None:
            return self.entries
        wanted = place if place >= 0 else self.places + place
        found = [index for index in sorted(self.entries) if (self.numbers or {}).get(index) == wanted]
        return {count: self.entries[index] for count, index in enumerate(found)}

    def is_at(self, point: Point) -> bool:
        """Return whether this track was recorded at ``point``, under any of its names."""
        module = self._module()
        if module is None or self._site is not point.site:
            return False
        if point.site is not Site.PARAMETER:
            return module is point.module and self._name == point.name
        mine = Point("", Site.PARAMETER, module, "", self._name).tensor
        return mine is not None and mine is point.tensor


class TapeView(Mapping[str, Any]):
    """Recorded values by address. Iteration yields addresses that each name one value."""

    _what = "value"

    make_tracks: Callable[[dict[str, Track]], None] | None = None
    """the function that creates the tracks on first access, because most of a large tape is never read"""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._made: dict[str, Track] = {}
        self._model = ref(model) if model is not None else _gone

    @cached_property
    def _aliases(self) -> dict[str, str]:
        return {}

    @cached_property
    def given_away(self) -> set[int] | None:
        """The addresses in memory of values that were read. None for values from a file, which no model holds."""
        return set()

    @property
    def _tracks(self) -> dict[str, Track]:
        """The tracks by address."""
        make = self.make_tracks
        if make is not None:
            self.make_tracks = None
            make(self._made)
        return self._made

    def __getitem__(self, address: str) -> Any:
        track = self._tracks.get(address) if type(address) is str else None
        if track is not None and track.numbers is None:  # The usual case: a recorded address with one call.
            entries = track.entries
            numbers = entries.numbers() if type(entries) is LogEntries else [*entries]
            if len(numbers) == 1:
                return self._read(entries[numbers[0]], address)
        base, call = self._find(address)
        place = self._place(base, address)
        entries = self._tracks[base].entries_at(place)
        if not entries:
            raise self._nothing(base if place is None else address)
        shown = base if place is None else _without_call(address)
        return self._read(entries[self._choose(shown, entries, call)], address)

    def calls(self, address: str) -> list[Any]:
        """Return the values of all calls that are kept, in the order of the calls; with ``#{2..8}``, of that range."""
        base, call = self._find(address)
        if isinstance(call, int):
            raise AddressError(f"{address!r} already names one call; use .calls({base!r})")
        entries = _of_range(self._tracks[base].entries_at(self._place(base, address)), call)
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
        if isinstance(call, int):
            index = self._position(entries, call)
            return index in entries and self._held(entries[index])
        return any(map(self._held, _of_range(entries, call).values()))

    def _read(self, entry: Any, address: str) -> Any:
        return read(entry, address, self.given_away)

    def _held(self, _entry: Any) -> bool:
        """Return whether an entry has something to read."""
        return True

    # -- lookup -------------------------------------------------------------------------------------------------------

    def _find(self, address: str) -> tuple[str, int | CallRange | None]:
        """Return the base address of the track for an address, and the call, the range of calls, or None.

        The address may be the one that was recorded, or another name of the same module.
        """
        if address in self._tracks:
            return address, None
        if isinstance(address, nn.Module):
            return self._at(address), None
        if not isinstance(address, str):
            raise NotRecorded(f"a tape is read by address, a str; got a {type(address).__name__}: {address!r:.80}")
        base, _, call = address.rpartition("#")
        if base in self._tracks and call.isdecimal():  # As a tape lists its own addresses.
            return base, int(call)
        parsed = parse(address)
        base = str(replace(parsed, call=None))
        for name_of in (str, self._aliases.get, self._alias):  # The last one searches the model.
            name = name_of(base)
            if name is not None and name in self._tracks:
                return name, parsed.call
        for name in _of_all_places(base):
            if name in self._tracks and self._tracks[name].numbers is not None:
                return name, parsed.call
        raise self._unknown(address)

    def _place(self, base: str, address: str) -> int | None:
        """Return the index of the place that an address names, if ``base`` was recorded at all places of a name."""
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
            raise NotRecorded(f"the output of this {type(module).__name__} is not on this tape. Use an address.")
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

    def _choose(self, base: str, entries: Mapping[int, Any], call: int | CallRange | None) -> int:
        if not isinstance(call, int):
            meant = _of_range(entries, call)
            asked = base if call is None else f"{base}#{call}"
            if len(meant) > 1:
                shown = listed([f"{base}#{index}" for index in sorted(meant)])
                fix = f"Read one of {shown}, or all of them with .calls({asked!r})."
                raise AmbiguousCall(f"{asked!r} was called {len(meant)} times, and each call was recorded.\n{fix}")
            if not meant:
                raise NotRecorded(f"{asked} was not recorded. Recorded calls: {_call_numbers(entries)}.")
            return min(meant)
        index: int = self._position(entries, call)
        if index not in entries:
            raise NotRecorded(f"{base}#{call} was not recorded. Recorded calls: {_call_numbers(entries)}.")
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
        return NotRecorded(f"{base!r} is selected, but it has not run yet. Call the model while the session is open.")


class Tape(Drawn, TapeView):
    """The values that a session recorded.

    ``tape[address]`` is the value, in the structure that the model produced. ``tape.grad[address]`` is its gradient.
    ``tape.calls(address)`` has one value per call. A tape is a mapping of all its values, point by point in the order
    of selection. :meth:`in_order` returns the same addresses in the order in which the values were produced.
    """

    started = True
    """False for the tape of a session that was not started yet"""

    script: Any = None
    """the data for th.replay, if replay= was given"""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._made = {}
        self._model = ref(model) if model is not None else _gone
        self.log = TapeLog()
        self.notes: dict[str, Any] = {}
        """Other facts about the run, as plain JSON: ``failure``, ``model``, ``tokens``, ``order``"""

    @cached_property
    def grad(self) -> Gradients:
        """The recorded gradients, by the same addresses."""
        from tenterhook.record.recorded_gradients import Gradients  # A local import: that module imports this one.

        return Gradients(self)

    def sequence(self, address: str, *, run: int = -1) -> Tensor:
        """Join the values of all steps of a call of ``generate`` along the tokens: ``[batch, tokens, ...]``.

        The result is what one forward pass over the prompt and the generated tokens gives. :attr:`tokens` are the
        tokens, in the same order, and :attr:`mask` is False at padding and after the end of a sequence. The last
        generated token is not among them, because the model never reads it.

        Args:
            address: the point, without a call number.
            run: which call of ``generate``, counted from 0; -1 is the last one.

        Raises:
            TapeError: no generation was recorded, a step is missing, or the steps cannot be joined (beam search,
                assisted decoding).
        """
        from tenterhook.record.generation import joined, run_of

        self.refuse_before_start()
        noted = run_of(self, run)
        base, call = self._find(address)
        if call is not None:
            raise AddressError(f"{address!r} names a call already; ask for the sequence of {base!r}")
        held = self._tracks[base].entries
        first, count = noted["calls"].get(base, (0, 0))
        calls = [call for call in range(first, first + count) if call in held]
        return joined(base, [self._read(held[call], f"{base}#{call}") for call in calls], noted)

    @property
    def tokens(self) -> Tensor:
        """The token ids ``[batch, tokens]`` that the model read in the last call of ``generate``."""
        from tenterhook.record.generation import run_of

        return torch.tensor(run_of(self, -1)["tokens"], dtype=torch.long)

    @property
    def mask(self) -> Tensor:
        """True for each of :attr:`tokens` that is neither padding nor after the end of its sequence."""
        from tenterhook.record.generation import run_of

        return torch.tensor(run_of(self, -1)["mask"], dtype=torch.bool)

    def where(self, address: str) -> str:
        """Return the file and line of a value inside a ``forward``, or an empty string for other points."""
        view = self.grad if self.gradients_alone else self
        return view._tracks[view._find(address)[0]].where

    @property
    def gradients_alone(self) -> bool:
        """True if this was recorded with ``values=False``."""
        return not self._tracks and bool(self.grad._tracks)

    def refuse_before_start(self) -> None:
        """Raise if the session of this tape was not started."""
        if not self.started:
            raise NotRecorded(NOT_STARTED)

    def _find(self, address: str) -> tuple[str, int | CallRange | None]:
        self.refuse_before_start()
        return super()._find(address)

    def _unknown(self, address: str) -> TenterhookError:
        if not self.gradients_alone:
            return super()._unknown(address)
        return NotRecorded(f"this tape has no values, only gradients (values=False): read tape.grad[{address!r}].")

    def in_order(self) -> list[str]:
        """Return the addresses in the order in which their values were produced.

        An output is produced when its call returns, an argument when the call begins, a variable when it is assigned.
        Files of old versions do not store this order. For them, this is the order of iteration.

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
        """True if the order in which the values were produced is known. Files of old versions do not store it."""
        return self.log.ordered

    @property
    def nbytes(self) -> int:
        """Number of bytes of all values and gradients on the tape."""
        kept = (value(entry) for track in self._tracks.values() for entry in track.entries.values())
        return sum(_nbytes(tensor) for held in (*kept, *self.grad.values()) for _, tensor in tensors(held))

    def clear(self) -> None:
        """Delete all recorded values and gradients. An open session continues to record."""
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
        """Compute the gradients of the recorded points, and nothing further back. Return ``tape.grad``.

        >>> import torch, tenterhook as th
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> with th.record(model, "1", grad=True) as tape:
        ...     loss = model(torch.ones(4, 2)).sum()
        >>> tape.backward(loss)["1"].shape, model[0].weight.grad
        (torch.Size([4, 3]), None)

        It works while the session is open and after it, as long as the graph exists. For this, a tape holds references
        to the graph nodes where its gradients arrive. It releases a node when a backward pass without ``retain_graph``
        reaches it. If there was such a pass during the session, it releases the other nodes when the session ends.
        :meth:`clear` releases all of them. A later call then runs through the whole graph of its loss, if that graph
        still exists.

        Args:
            loss: the tensor to differentiate: a single number, or any tensor together with ``gradient``.
            gradient: the gradient of ``loss`` itself, with the same shape.
            parameters: whether to run the usual backward pass, which also accumulates into the parameters' ``.grad``.
            retain_graph: whether to keep the graph for another pass. Gradients of several passes add up.
            create_graph: whether to build a graph of the gradients, so that they can be differentiated again.

        Returns:
            ``tape.grad``, the gradients by address.

        Raises:
            GradientError: the tape records no gradients, or the loss does not depend on a recorded point, or its graph
                was freed.
        """
        from tenterhook.record.tape_backward import backward

        backward(self, loss, gradient, parameters=parameters, retain_graph=retain_graph, create_graph=create_graph)
        return self.grad

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tape to one file: safetensors and plain text, no pickle.

        The file is complete, or it is not written.
        """
        from tenterhook.record.tape_file import save  # Loads safetensors only when needed.

        save(self, path)

    # -- display ------------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """Return a table with one row per recorded tensor."""
        from tenterhook.record.tape_table import table

        return table(self)

    def plot(self, address: str, *, maps: int = 64) -> Figure:
        """Return a matplotlib figure of one value and its gradient: maps, a matrix or a line, next to a histogram.

        It needs ``tenterhook[page]``. A value with several tensors gets one row for each. As the last line of a
        notebook's cell it is shown.
        """
        from tenterhook._look.figure import figure

        track = self._tracks[self._find(address)[0]]
        return figure(self._shown(address), module=track.kind, parameter=track.site == "parameter", maps=maps)

    def look(self, address: str) -> Card:
        """Return a card of one value: its statistics as text, and also as plots in a notebook."""
        from tenterhook._look.card import Card
        from tenterhook.record.tape_table import table

        self[address]  # Raises now if the address is wrong, and not when the card is displayed.
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
    """Return the addresses that stand for all places of a name, if ``base`` names one of its places."""
    parsed = parse(base)
    if not parsed.inner or parsed.inner[-1].place is None:
        return []
    *above, last = parsed.inner
    others = [replace(last, place=place) for place in (None, Wild.ANY) if place is not last.place]
    return [str(replace(parsed, inner=(*above, other))) for other in others]


def _of_range(entries: Mapping[int, Any], call: CallRange | None) -> Mapping[int, Any]:
    """Return the entries of a range of calls; all of them for None."""
    return entries if call is None else {index: entry for index, entry in entries.items() if index in call}


def _call_numbers(entries: Mapping[int, Any]) -> str:
    return listed([f"#{call}" for call in sorted(entries)])


def load(path: str | os.PathLike[str]) -> Tape:
    """Read a tape that ``tape.save`` wrote. No code from the file is executed.

    >>> import os, tempfile, torch, tenterhook as th
    >>> model = torch.nn.Linear(2, 2)
    >>> with th.record(model) as tape:
    ...     output = model(torch.ones(1, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tape.save(os.path.join(folder, "run.th"))
    ...     again = th.load(os.path.join(folder, "run.th"))
    >>> torch.equal(again[":return"], output)
    True

    Raises:
        TapeFileError: the file is missing, is not a tape, or is damaged.
    """
    from tenterhook.record import tape_file  # Loads safetensors only when needed.

    return tape_file.load(path)
