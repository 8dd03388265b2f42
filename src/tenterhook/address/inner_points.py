"""The names that are valid after a colon: the arguments of a ``forward``, its output, and the places inside it.

:func:`sites_inside` alone decides which names are valid.
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
from tenterhook.address.point import Meaning, Site
from tenterhook.address.suggest import listed, nearest
from tenterhook.errors import AddressError, NoSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["Arguments", "InnerPlaces", "InnerPoint", "arguments", "no_such_name", "sites_inside"]

# The number of nested function calls that are searched for a name.
DEPTH = 4


class Arguments(NamedTuple):
    """The arguments that a ``forward`` accepts."""

    names: tuple[str, ...]
    any_name: bool
    """True if it accepts any keyword (``**kwargs``)"""


@dataclass(frozen=True, eq=False)
class InnerPlaces:
    """Places in one function, and the calls that lead to it from the module's ``forward``.

    A function without source has no places. It only has the name of an operation that it may call.
    """

    function: FunctionType
    places: tuple[Place, ...]
    route: tuple[Callee, ...] = ()
    operation: str | None = None
    meaning: Meaning | None = None
    """for a value that an attention call takes or computes; then there are no places"""

    @functools.cached_property
    def lines(self) -> tuple[int, ...]:
        """The lines on which the places begin."""
        return tuple(dict.fromkeys(place.line for place in self.places))

    @functools.cached_property
    def where(self) -> str:
        """File and line of the first place."""
        line = self.places[0].line if self.places else self.function.__code__.co_firstlineno
        return f"{self.function.__code__.co_filename}:{line}"


class InnerPoint(NamedTuple):
    """A site on a module, its name if it has one, and its places inside ``forward``."""

    site: Site
    name: str | None = None
    spot: InnerPlaces | None = None


_NOTHING = Arguments((), any_name=False)
_UNKNOWN = Arguments((), any_name=True)
_known: WeakKeyDictionary[Callable[..., Any], Arguments] = WeakKeyDictionary()


def arguments(module: nn.Module) -> Arguments:
    """Return the arguments of a module's ``forward``, without ``self``.

    >>> arguments(nn.Bilinear(1, 1, 1)).names
    ('input1', 'input2')
    """
    own = module.__dict__.get("forward")
    if own is not None:
        # Not cached: the function may refer to the module, and the cache would then keep the model alive.
        return _read(own)
    forward = getattr(type(module), "forward", None)
    if forward is nn.Module.forward:
        return _NOTHING  # a container such as ModuleList, which cannot be called
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
        return _UNKNOWN  # compiled code without a signature: any name may be valid
    return Arguments(tuple(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values()))


def sites_inside(module: nn.Module, inner: tuple[Inner, ...], *, literal: bool) -> list[InnerPoint]:
    """Return the sites on ``module`` that ``inner`` selects.

    ``*`` selects every argument by its name, every place inside, and ``return``. It does not select ``in``, which is
    another name for the first argument. If ``forward`` accepts any keyword, every literal name is valid.

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
    """Return the sites of a literal name in a ``forward`` that accepts any keyword.

    The name is searched in ``forward``, then in the functions that it calls. Otherwise it is a keyword.
    """
    try:
        found = _inside(module, inner, literal=True)
    except NoSource:
        found = []
    found = found or _inside(module, inner, literal=False)
    return found if found or _looks_mistyped(name, module, takes) else [InnerPoint(Site.ARGUMENT, name)]


def _looks_mistyped(wanted: str, module: nn.Module, takes: Arguments) -> bool:
    """Return whether a keyword is almost a name that ``forward`` spells out, and so is probably a typing error."""
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
    """Return places inside ``forward``. A function without source is an error only if ``literal`` is true."""
    if getattr(type(module), "forward", None) is nn.Module.forward:  # A ScriptModule class has no forward of its own.
        return []
    try:
        asked: tuple[Any, ...] = (forward_of(module), type(module), inner, literal)
        # An empty result is not cached: a module that defines the name may be imported later.
        return list(_search(*asked) or _search.__wrapped__(*asked))
    except NoSource:
        operation = _operation(module, inner) if literal else None
        if literal and operation is None:
            raise
        return [operation] if operation is not None else []


@functools.lru_cache(maxsize=1024)
def _search(function: FunctionType, cls: type, inner: tuple[Inner, ...], literal: bool) -> tuple[InnerPoint, ...]:  # noqa: FBT001
    """Return the places, cached for all modules of a class."""
    found = list(_spots(function, cls, inner, "", ()))
    if not literal and len(inner) == 1 and inner[0].name.literal is not None:
        found += list(_deeper(function, cls, inner, "", (), {function}))
    return tuple([InnerPoint(Site.VARIABLE, text, spot) for text, spot in found])


def _operation(module: nn.Module, inner: tuple[Inner, ...]) -> InnerPoint | None:
    """Return the point of a call by its name in a Python function without source.

    The call can still be observed when PyTorch runs the operation.
    """
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
    """Yield the places of one function that a name matches: all of one name together, or each separately for a glob.

    The arguments of a called function are included. The arguments of ``forward`` are a site of their own.
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
    several.update(place.text for place in known if place.kind == "argument")  # Without a number: the argument.
    for place in found:
        if wanted.place in (None, Wild.ANY, place.number):
            number = f"[{place.number}]" if several[place.text] > 1 and place.kind != "argument" else ""
            yield place.text + number, (place,)


@functools.lru_cache(maxsize=4096)
def _as_written(name: str) -> str:
    """Return a target such as ``out["x"]`` in the one spelling that is used for comparisons."""
    if name.isidentifier():
        return name
    try:
        return ast.unparse(ast.parse(name, mode="eval"))
    except SyntaxError:
        return name


def _entered(function: FunctionType, cls: type, wanted: Inner) -> Iterator[tuple[str, Callee]]:
    """Yield the functions that a call of this name enters."""
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
    """Yield the places in the nearest functions below this one that have them."""
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
    """Return the error for a module that exists but has nothing that ``inner`` matches."""
    owner, takes = type(module).__name__, list(arguments(module).names)
    wanted = str(inner[-1]) if len(inner) > 1 or inner[-1].is_call else inner[-1].name.literal or str(inner[-1])
    try:
        known = _reachable(module, inner)
    except NoSource:
        known = {}
    if wanted == "in" or (not takes and not known):
        return AddressError(
            f"{text!r}: {owner}.forward takes no argument.\nTo record its output, remove the part after the colon."
        )
    near = nearest(wanted, [*takes, *known])
    lines = [f"{text!r}: {owner}.forward has nothing with the name {wanted!r}."]
    if takes:
        lines.append(f"Its arguments: {listed(takes)}; ':in' is the first of them, ':return' is the output.")
    if near:
        shown = [f"{name} (line {known[name].line})" if name in known else name for name in near]
        lines.append(f"Did you mean {listed(shown)}?")
    path = text.partition(":")[0]
    lines.append(f"Print tenterhook.points(model, {path + ':*'!r}) to see all names beside the source.")
    return AddressError("\n".join(lines))


def _reachable(module: nn.Module, inner: tuple[Inner, ...]) -> dict[str, Place]:
    """Return the places of the function in which the last name was searched, by name."""
    function = forward_of(module)
    for step in inner[:-1]:
        entered = next(iter(_entered(function, type(module), step)), None)
        if entered is None:
            break
        function = entered[1].function
    own = len(inner) == 1  # The arguments of forward itself are listed separately.
    return {place.text: place for place in reversed(places_of(function)) if not (own and place.kind == "argument")}
