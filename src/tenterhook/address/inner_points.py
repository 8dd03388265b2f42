"""What can be named after a colon: the arguments of a ``forward``, what it returns, and what is inside it.

:func:`sites_inside` is the one place that decides it.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from tenterhook.address.functions import Callee, callees, forward_of, handed_on, places_of
from tenterhook.address.globs import name_regex
from tenterhook.address.grammar import Choice, Inner, Pattern, Wild
from tenterhook.address.places import Place, places
from tenterhook.address.point import Site
from tenterhook.address.suggest import listed, nearest
from tenterhook.errors import AddressError, NoSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["Arguments", "InnerPlaces", "InnerPoint", "arguments", "no_such_name", "sites_inside"]

# How far a name is searched for in functions that functions call.
DEPTH = 4


class Arguments(NamedTuple):
    """What a ``forward`` takes."""

    names: tuple[str, ...]
    any_name: bool
    """whether it takes keywords that it does not name (``**kwargs``)"""


@dataclass(frozen=True, eq=False)
class InnerPlaces:
    """Places in one function, and the calls through which it is reached from the module's ``forward``.

    In a function without source there are no places, only the name of an operation that it may make.
    """

    function: FunctionType
    places: tuple[Place, ...]
    route: tuple[Callee, ...] = ()
    operation: str | None = None

    @functools.cached_property
    def lines(self) -> tuple[int, ...]:
        """The lines on which they begin."""
        return tuple(dict.fromkeys(place.line for place in self.places))

    @functools.cached_property
    def where(self) -> str:
        """File and line of the first of them."""
        line = self.places[0].line if self.places else self.function.__code__.co_firstlineno
        return f"{self.function.__code__.co_filename}:{line}"


class InnerPoint(NamedTuple):
    """A site on a module, its name where it has one, and where it is inside ``forward``."""

    site: Site
    name: str | None = None
    spot: InnerPlaces | None = None


_NOTHING = Arguments((), any_name=False)
_UNKNOWN = Arguments((), any_name=True)
_known: WeakKeyDictionary[Callable[..., Any], Arguments] = WeakKeyDictionary()


def arguments(module: nn.Module) -> Arguments:
    """The arguments of a module's ``forward``, the module itself left out.

    >>> arguments(nn.Bilinear(1, 1, 1)).names
    ('input1', 'input2')
    """
    own = module.__dict__.get("forward")
    if own is not None:
        # Not kept: it may hold the module, and what we kept would then keep the model alive.
        return _read(own)
    forward = getattr(type(module), "forward", None)
    if forward is nn.Module.forward:
        return _NOTHING  # a container such as ModuleList: it cannot be called
    if not inspect.isfunction(forward):
        return _read(module.forward)
    known = _known.get(forward)
    if known is None:
        known = _known[forward] = _read(functools.partial(forward, module))
    return known


def _read(function: Callable[..., Any]) -> Arguments:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return _UNKNOWN  # compiled code that does not tell: any name may be right
    return Arguments(tuple(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values()))


def sites_inside(module: nn.Module, inner: tuple[Inner, ...], *, literal: bool) -> list[InnerPoint]:
    """The sites on ``module`` that ``inner`` stands for.

    ``*`` is every argument by its name, every place inside, and ``return``; ``in``, which is another name for the first
    argument, has to be written out. A ``forward`` that takes any keyword takes every name that is given literally.

    >>> linear = nn.Linear(1, 1)
    >>> [found.name for found in sites_inside(linear, (Inner(Pattern((Wild.ANY,))),), literal=True)]
    ['input', 'linear()', None]
    """
    if not inner:
        return [InnerPoint(Site.RETURN)]
    wanted = inner[0].name.literal
    if len(inner) > 1 or inner[0].is_call or inner[0].place is not None:
        return _inside(module, inner, literal=literal)
    takes = arguments(module)
    if wanted is None:
        return _globbed(module, takes, inner[0])
    if wanted == "in" or wanted in takes.names:
        site, name = (Site.IN, None) if wanted == "in" else (Site.ARGUMENT, wanted)
        return [InnerPoint(site, name)] if takes.names or takes.any_name else []
    if literal and takes.any_name:
        return _inside_or_keyword(module, inner, wanted, takes)
    return _inside(module, inner, literal=literal)


def _inside_or_keyword(module: nn.Module, inner: tuple[Inner, ...], name: str, takes: Arguments) -> list[InnerPoint]:
    """A literal name where any keyword is taken: the forward's own, that of a function it calls, or a keyword."""
    try:
        found = _inside(module, inner, literal=True)
    except NoSource:
        found = []
    found = found or _inside(module, inner, literal=False)
    return found if found or _looks_mistyped(name, module, takes) else [InnerPoint(Site.ARGUMENT, name)]


def _looks_mistyped(wanted: str, module: nn.Module, takes: Arguments) -> bool:
    """Whether a keyword that ``forward`` would take is all but one that it spells out, and so hardly meant."""
    try:
        inside = [place.name for place in places_of(forward_of(module))]
    except NoSource:
        inside = []
    return bool(difflib.get_close_matches(wanted, [*takes.names, *inside], n=1, cutoff=0.85))


def _globbed(module: nn.Module, takes: Arguments, inner: Inner) -> list[InnerPoint]:
    fits = _fits(inner.name)
    found: list[InnerPoint] = []
    if takes.names and not _has_star(inner.name) and fits("in"):
        found.append(InnerPoint(Site.IN))
    found += [InnerPoint(Site.ARGUMENT, name) for name in takes.names if fits(name)]
    found += _inside(module, (inner,), literal=False)
    if fits("return"):
        found.append(InnerPoint(Site.RETURN))
    return found


def _inside(module: nn.Module, inner: tuple[Inner, ...], *, literal: bool) -> list[InnerPoint]:
    """Places inside ``forward``; a function that cannot be read is an error only where it was asked for literally."""
    if getattr(type(module), "forward", None) is nn.Module.forward:  # The class of a script has none to show.
        return []
    try:
        asked: tuple[Any, ...] = (forward_of(module), type(module), inner, literal)
        # What is not there now may be there later, when a module of the package has been imported that it comes from.
        return list(_search(*asked) or _search.__wrapped__(*asked))
    except NoSource:
        operation = _operation(module, inner) if literal else None
        if literal and operation is None:
            raise
        return [operation] if operation is not None else []


@functools.lru_cache(maxsize=1024)
def _search(function: FunctionType, cls: type, inner: tuple[Inner, ...], literal: bool) -> tuple[InnerPoint, ...]:  # noqa: FBT001
    """The same, for all modules of a class."""
    found = list(_spots(function, cls, inner, "", ()))
    if not literal and len(inner) == 1 and inner[0].name.literal is not None:
        found += list(_deeper(function, cls, inner, "", (), {function}))
    return tuple([InnerPoint(Site.VARIABLE, text, spot) for text, spot in found])


def _operation(module: nn.Module, inner: tuple[Inner, ...]) -> InnerPoint | None:
    """A call by its name in a Python function without source: it can still be told as PyTorch makes it."""
    name = inner[0].name.literal
    if len(inner) > 1 or name is None or not inner[0].is_call or inner[0].place is not None:
        return None
    return InnerPoint(Site.VARIABLE, str(inner[0]), InnerPlaces(forward_of(module), (), operation=name))


def _spots(
    function: FunctionType, cls: type, inner: tuple[Inner, ...], before: str, route: tuple[Callee, ...]
) -> Iterator[tuple[str, InnerPlaces]]:
    head, rest = inner[0], inner[1:]
    if not rest:
        for text, found in _here(function.__code__, function.__qualname__, head, entered=bool(route)):
            yield before + text, InnerPlaces(function, found, route)
        return
    for text, callee in _entered(function, cls, head):
        yield from _spots(callee.function, cls, rest, f"{before}{text}:", (*route, callee))


@functools.lru_cache(maxsize=4096)
def _here(code: CodeType, qualname: str, wanted: Inner, *, entered: bool) -> tuple[tuple[str, tuple[Place, ...]], ...]:
    return tuple(_find_here(places(code, qualname), wanted, entered=entered))


def _find_here(known: tuple[Place, ...], wanted: Inner, *, entered: bool) -> Iterator[tuple[str, tuple[Place, ...]]]:
    """The places of one function that a name stands for: all its namesakes together, or each by itself for a glob.

    The arguments of a function that was entered are among them; those of a ``forward`` are a site of their own.
    """
    name, every = wanted.name.literal, wanted.name.pieces == (Wild.ANY,)
    fits = _fits(wanted.name) if name is None else _as_written(name).__eq__
    kinds = {"call"} if wanted.is_call else {"name", "call"} if every else {"name"}
    if entered and not wanted.is_call and wanted.place is None:
        kinds.add("argument")
    found = [place for place in known if place.kind in kinds and fits(place.name)]
    if name is not None and any(place.kind == "argument" for place in found):
        found = found[:1]
    if name is not None:
        if isinstance(wanted.place, int):
            found = found[wanted.place :][:1] if wanted.place >= 0 else found[wanted.place :][: 1 if found else 0]
        if found:
            yield str(wanted), tuple(found)
        return
    several = Counter(place.text for place in found)
    several.update(place.text for place in known if place.kind == "argument")  # Without a number, that is the argument.
    for place in found:
        if wanted.place in (None, Wild.ANY, place.number):
            number = f"[{place.number}]" if several[place.text] > 1 and place.kind != "argument" else ""
            yield place.text + number, (place,)


@functools.lru_cache(maxsize=4096)
def _as_written(name: str) -> str:
    """A target such as ``out["x"]`` in the one spelling that it is compared by."""
    if name.isidentifier():
        return name
    try:
        return ast.unparse(ast.parse(name, mode="eval"))
    except SyntaxError:
        return name


def _entered(function: FunctionType, cls: type, wanted: Inner) -> Iterator[tuple[str, Callee]]:
    """The functions that a call of that name leads into."""
    fits, known = _fits(wanted.name), callees(function, cls)
    chosen = {name: callee for name, callee in known.items() if fits(name)}
    name = wanted.name.literal
    if not chosen and name is not None:
        further = handed_on(function, name)
        chosen = {name: further} if further is not None else {}
    for found, callee in chosen.items():
        at = callee.at[wanted.place : wanted.place + 1] if isinstance(wanted.place, int) else callee.at
        if at:
            yield str(replace(wanted, name=Pattern((found,)))), Callee(callee.function, at)


def _deeper(
    function: FunctionType,
    cls: type,
    inner: tuple[Inner, ...],
    before: str,
    route: tuple[Callee, ...],
    seen: set[FunctionType],
) -> Iterator[tuple[str, InnerPlaces]]:
    """The nearest functions below this one that have the place."""
    if len(route) >= DEPTH:
        return
    for name, callee in callees(function, cls).items():
        if callee.function in seen:
            continue
        seen.add(callee.function)
        try:
            text, further = f"{before}{name}():", (*route, callee)
            found = list(_spots(callee.function, cls, inner, text, further))
            yield from found or _deeper(callee.function, cls, inner, text, further, seen)
        except NoSource:
            continue


@functools.lru_cache(maxsize=1024)
def _fits(pattern: Pattern) -> Callable[[str], object]:
    return re.compile(name_regex(pattern), re.DOTALL).fullmatch


def _has_star(pattern: Pattern) -> bool:
    return any(
        isinstance(piece, Wild) or (isinstance(piece, Choice) and any(map(_has_star, piece.options)))
        for piece in pattern.pieces
    )


def no_such_name(text: str, module: nn.Module, inner: tuple[Inner, ...]) -> AddressError:
    """The error for a module that is there and has nothing that ``inner`` could stand for."""
    owner, takes = type(module).__name__, list(arguments(module).names)
    wanted = str(inner[-1]) if len(inner) > 1 or inner[-1].is_call else inner[-1].name.literal or str(inner[-1])
    try:
        known = _reachable(module, inner)
    except NoSource:
        known = {}
    if wanted == "in" or (not takes and not known):
        return AddressError(f"{text!r}: {owner}.forward takes no argument.\nRecord its output: drop what follows ':'.")
    near = nearest(wanted, [*takes, *known])
    lines = [f"{text!r}: nothing inside {owner}.forward is called {wanted!r}."]
    if takes:
        lines.append(f"Its arguments: {listed(takes)}; ':in' is the first of them, ':return' the output.")
    if near:
        shown = [f"{name} (line {known[name].line})" if name in known else name for name in near]
        lines.append(f"Did you mean {listed(shown)}?")
    path = text.partition(":")[0]
    lines.append(f"Print tenterhook.points(model, {path + ':*'!r}) to see all of it beside its source.")
    return AddressError("\n".join(lines))


def _reachable(module: nn.Module, inner: tuple[Inner, ...]) -> dict[str, Place]:
    """The places of the function that the last name was looked for in, by name."""
    function = forward_of(module)
    for step in inner[:-1]:
        entered = next(iter(_entered(function, type(module), step)), None)
        if entered is None:
            break
        function = entered[1].function
    own = len(inner) == 1  # A forward's own arguments are listed apart.
    return {place.text: place for place in reversed(places_of(function)) if not (own and place.kind == "argument")}
