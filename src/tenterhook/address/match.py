"""Resolution of selectors to the points of one model.

A literal address is followed directly to its module. Only globs, classes, regexes and predicates walk the model.
"""

# This file reads a module's own dictionaries: the public methods are slower and skip entries that are None.

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, TypeAlias, Union

from torch import nn

from tenterhook.address.found_points import FoundPoints, is_plain_variable, remember
from tenterhook.address.globs import has_literal, path_regex
from tenterhook.address.grammar import ESCAPED, Address, CallRange, Pattern, Wild, escape, parse
from tenterhook.address.inner_points import arguments, no_such_name, sites_inside
from tenterhook.address.meanings import meaning_points, no_meaning
from tenterhook.address.point import Point, Site, own_tensor
from tenterhook.address.suggest import listed, nearest, no_match, no_module_of_class, not_part_of, unknown_name
from tenterhook.address.walk import (
    Named,
    NamedTensor,
    Structure,
    all_names,
    find,
    first_names,
    last_structure,
    named_tensors,
    structure,
    through_wrappers,
    true_names,
    walk,
)
from tenterhook.errors import AddressError, SelectorError
from tenterhook.pytorch.module_calls import buffers_of, children_of, parameters_of
from tenterhook.pytorch.wrappers import WRAPPED_NAMES, has_wrapped_name, unwrapped

__all__ = ["Point", "Selector", "Site", "canonical", "merged", "points_found", "points_found_now", "resolve"]

Selector: TypeAlias = Union[
    str,
    nn.Module,
    type[nn.Module],
    "re.Pattern[str]",
    Callable[[str, nn.Module], Any],
    Point,
    "Sequence[Selector]",
    "AbstractSet[Selector]",
]
DefaultSite: TypeAlias = Literal[Site.RETURN, Site.IN]

_ACCEPTED = (
    "A selector is an address ('h.3', 'h.*.attn:in'), a module of the model, a module class (nn.Linear), "
    "a compiled regex, a predicate (name, module) -> bool, a Point or Selection, or a list of these."
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A parsed address, with everything that can be computed without a model."""

    address: Address
    text: str
    """canonical text, without the call"""
    path: str
    """the module's name, if it contains no glob"""
    names: tuple[str, ...] | None
    explicit: bool
    every: bool
    """True if the path is ``**``"""
    fits: Callable[[str], object]
    fits_name: Callable[[str], object] | None
    """the test for the last segment alone, if the address can match a parameter"""
    is_remembered: bool
    """True for a glob of outputs, or of one variable: the points that it finds are remembered with the model"""


@functools.lru_cache(maxsize=4096)
def _plan(text: str) -> _Plan:
    address = parse(text)
    names, path = address.names, address.path
    alone = names is None and not address.inner and address.call is None and address.meaning is None
    fits_name = _fits(path[-1:]) if alone and has_literal(path[-1]) else None
    inside = len(address.inner) == 1 and address.inner[0].name.literal is not None
    pattern = names is None and address.call is None and address.meaning is None and fits_name is None
    return _Plan(
        address,
        text=str(replace(address, call=None)),
        path=".".join(names or ()),
        names=names,
        explicit=address.is_literal,
        every=path == _EVERY,
        fits=_fits(path),
        fits_name=fits_name,
        is_remembered=pattern and (inside or not address.inner),
    )


_EVERY = (Pattern((Wild.DEEP,)),)


def _fits(path: tuple[Pattern, ...]) -> Callable[[str], object]:
    return re.compile(path_regex(path)).fullmatch


def resolve(model: nn.Module, selectors: Selector, *, default_site: DefaultSite = Site.RETURN) -> tuple[Point, ...]:
    """Return the points that ``selectors`` match, each once.

    The points are in the order of the selectors and, within one selector, in the model's order.

    An address names its own site. ``default_site`` applies to selectors that name only modules (objects, classes,
    regexes, predicates). A literal address keeps the name as written, even if a shared module has an earlier name: see
    :func:`canonical`.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> [str(point) for point in resolve(model, ["2:in", nn.Linear, "*.bias"])]
    ['2:in', '0', '2', '0.bias', '2.bias']
    """
    if not isinstance(model, nn.Module):
        raise SelectorError(_no_model(model))
    if isinstance(selectors, str):  # As in most sessions.
        return tuple(_resolve_one(model, selectors, default_site))
    found = [_resolve_one(model, selector, default_site) for selector in _flat(selectors)]
    # Each selector finds a point at most once. With a single selector, as in most sessions, there is nothing to merge.
    return tuple(found[0]) if len(found) == 1 else merged(found)


def points_found(model: nn.Module, text: str) -> FoundPoints | None:
    """Return the outputs, or the variables, that a glob matches, from the cache if possible.

    Return None for a selector of another kind.
    """
    if not isinstance(model, nn.Module):
        raise SelectorError(_no_model(model))
    plan = _plan(text)
    if not plan.is_remembered:
        return None
    known = last_structure(model)
    if known is not None and text in known.globs:
        # The start of the session looks whether the model has changed since.
        remembered = known.globs[text]
        return None if remembered is None else FoundPoints(known, text, remembered)
    return _found(model, text, plan)


def points_found_now(model: nn.Module, found: FoundPoints) -> FoundPoints | None:
    """Return the points that the same glob matches in the model now, or None if they are of another kind."""
    if found.spots:
        structure(model)[0].globs.pop(found.text, None)
    return _found(model, found.text, _plan(found.text))


def _found(model: nn.Module, text: str, plan: _Plan) -> FoundPoints | None:
    known, _, modules = structure(model)
    if text not in known.globs:
        points = _glob(model, text, plan)
        alike = not plan.address.inner or all(map(is_plain_variable, points))
        known.globs[text] = remember(points, modules, _above(model, plan.address.path)) if alike else None
    remembered = known.globs[text]
    if remembered is None:
        return None
    found = FoundPoints(known, text, remembered)
    return found if found.look(model) else None


def _above(model: nn.Module, path: tuple[Pattern, ...]) -> list[nn.Module] | None:
    """Return the modules whose children decide what a glob matches, or None if these may be any modules."""
    firsts, others = walk(model)
    if others or any(Wild.DEEP in part.pieces for part in path) or any(True for _ in _wrapped(model)):
        return None
    fits = [_fits(path[:depth]) for depth in range(len(path))]
    depths = ((name.count(".") + 1 if name else 0, name, module) for name, module in firsts)
    return [module for depth, name, module in depths if depth < len(fits) and fits[depth](name)]


def canonical(model: nn.Module, points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the same points under their first names, each once."""
    names = first_names(model)
    return merged([[_renamed(model, point, names) for point in points]])


def _no_model(model: object) -> str:
    got = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    inner = getattr(model, "__self__", None)
    fix = " (the model, not its method)" if isinstance(inner, nn.Module) else ""
    return f"The model must be an nn.Module; got {got}.\nPass the nn.Module itself{fix}."


def _flat(selectors: Selector) -> Iterator[Selector]:
    if isinstance(selectors, (str, nn.Module)):
        yield selectors
    elif isinstance(selectors, (Sequence, AbstractSet)) and not isinstance(selectors, (bytes, bytearray)):
        # The order of a set of strings changes from run to run. The order of the points must not.
        unordered = isinstance(selectors, AbstractSet) and all(isinstance(selector, str) for selector in selectors)
        for selector in sorted(selectors, key=str) if unordered else selectors:
            yield from _flat(selector)
    else:
        yield selectors


def _resolve_one(model: nn.Module, selector: Selector, site: DefaultSite) -> list[Point]:
    if isinstance(selector, str):
        plan = _plan(selector)
        return _glob(model, selector, plan) if plan.names is None else _literal(model, selector, plan, plan.names)
    if isinstance(selector, nn.Module):
        return _object(model, selector, site)
    if isinstance(selector, Point):
        return [_own_point(model, selector)]
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        cls = selector
        found = _filtered(model, lambda _, module: isinstance(module, cls), site)
        if not found:  # It may be the class of a wrapper, which selects the module inside.
            inside = {id(unwrapped(module)) for module in _wrapped(model) if isinstance(module, cls)}
            found = _filtered(model, lambda _, module: id(module) in inside, site) if inside else found
        return _some(found, lambda: no_module_of_class(model, cls))
    if isinstance(selector, re.Pattern) and isinstance(selector.pattern, str):
        text = selector.pattern
        found = _filtered(model, lambda name, _: selector.search(name), site)
        return _some(found, lambda: no_match(model, f"the regex {text!r}", text))
    if callable(selector) and not isinstance(selector, type):
        found = _filtered(model, selector, site)
        what = f"the predicate {getattr(selector, '__qualname__', type(selector).__name__)}"
        return _some(found, lambda: no_match(model, what, ""))
    got = f"the class {selector.__name__}" if isinstance(selector, type) else f"a {type(selector).__name__}"
    fix = "\nPass only its addresses, as a list." if isinstance(selector, Mapping) else ""
    message = f"{got} cannot select points: {selector!r:.80}{fix}\n{_ACCEPTED}"
    raise SelectorError(message)


def _some(points: list[Point], error: Callable[[], AddressError]) -> list[Point]:
    if not points:
        raise error()
    return points


# --- literal addresses: no walk ---------------------------------------------------------------------------------------


def _literal(model: nn.Module, text: str, plan: _Plan, names: tuple[str, ...]) -> list[Point]:
    module = model
    for depth, name in enumerate(names):
        children = children_of(module)
        # The first two conditions are those of most modules, without a call of a function.
        if (type(children) is not dict or not children.keys().isdisjoint(WRAPPED_NAMES)) and has_wrapped_name(children):
            module = unwrapped(module)
            children = children_of(module)
        child = children[name] if name in children else None  # noqa: SIM401  # the table of a ScriptModule has no get()
        if child is None:
            return _literal_otherwise(model, text, plan, names, depth, module)
        module = child
    return _at_module(model, text, plan, unwrapped(module))


def _at_module(model: nn.Module, text: str, plan: _Plan, module: nn.Module) -> list[Point]:
    address = plan.address
    if address.meaning is not None:
        points = meaning_points(plan.path, module, address.meaning, address.head, address.call, explicit=plan.explicit)
        wanted = address.meaning
        return _some(points, lambda: no_meaning(model, text, plan.path, module, wanted))
    if not address.inner:
        return [Point(plan.text, Site.RETURN, module, plan.path, None, address.call, plan.explicit)]
    points = _inside([(plan.path, module)], address, explicit=plan.explicit)
    return _some(points, lambda: no_such_name(text, module, address.inner))


def _literal_otherwise(
    model: nn.Module, text: str, plan: _Plan, names: tuple[str, ...], depth: int, reached: nn.Module
) -> list[Point]:
    """Return the point of a name that is not a plain module path: a parameter, or a path with a wrapper's prefix."""
    if depth + 1 == len(names) and own_tensor(reached, names[-1]) is not None:
        return [_at_tensor(text, plan, names, reached)]
    found = through_wrappers(model, names)
    if found is None:
        raise unknown_name(model, text, names, depth, reached)
    module, tensor, path = found
    names = path if tensor is None else (*path, tensor)
    plain = _plan(str(replace(plan.address, path=tuple(Pattern((name,)) for name in names))))
    return _at_module(model, text, plain, module) if tensor is None else [_at_tensor(text, plain, names, module)]


def _at_tensor(text: str, plan: _Plan, names: tuple[str, ...], owner: nn.Module) -> Point:
    if plan.address.inner or plan.address.call is not None:
        path = escape(plan.path)
        message = (
            f"{text!r}: {path!r} is a parameter or a buffer, which has no calls and no inner names.\nWrite {path!r}."
        )
        raise AddressError(message)
    return Point(plan.text, Site.PARAMETER, owner, ".".join(names[:-1]), names[-1], None, plan.explicit)


# --- globs, classes, regexes, predicates: one walk --------------------------------------------------------------------


def _glob(model: nn.Module, text: str, plan: _Plan) -> list[Point]:
    address = plan.address
    if plan.fits_name is not None:
        if modules := _only_modules(model, plan, plan.fits_name):
            return _returns(modules, None, explicit=False)
        points = _modules_and_tensors(model, walk(model), plan.fits, plan.fits_name)
        return _some(points, lambda: _no_glob(model, text, address))
    modules = walk(model)[0] if plan.every else _matching_path(model, plan)
    if not modules:
        raise _no_glob(model, text, address)
    if address.meaning is not None:
        wanted = address.meaning
        found = [
            point
            for path, module in modules
            for point in meaning_points(path, module, wanted, address.head, address.call, explicit=False)
        ]
        return _some(found, lambda: no_meaning(model, text, *modules[0], wanted))
    if not address.inner:
        return _returns(modules, address.call, explicit=False)
    # A glob matches modules whose forward spells the name out, not every module that accepts any keyword.
    return _some(_inside(modules, address, explicit=False), lambda: _no_glob_inside(text, modules, address))


def _matching(
    model: nn.Module, walked: tuple[list[Named], list[Named]], fits: Callable[[str, nn.Module], object]
) -> list[Named]:
    """Return the modules that match under any of their names, each under its first name.

    Names with the prefixes of wrappers are only tried if no plain name matches.
    """
    firsts, others = walked
    if not others:
        found = [item for item in firsts if fits(*item)]
    else:
        ids = {id(module) for path, module in all_names(walked) if fits(path, module)}
        found = [item for item in firsts if id(item[1]) in ids]
    if found or not any(True for _ in _wrapped(model)):
        return found
    ids = {id(module) for path, module in true_names(model) if fits(path, module)}
    return [item for item in firsts if id(item[1]) in ids]


def _only_modules(model: nn.Module, plan: _Plan, fits_name: Callable[[str], object]) -> list[Named]:
    """Return the modules whose path matches, if there are some, and if no parameter or buffer has a name that fits."""
    known, _, modules = structure(model)
    there = [module for module in modules if module is not None]
    names = set(chain.from_iterable(chain(map(parameters_of, there), map(buffers_of, there))))
    return [] if any(map(fits_name, names)) else _matching_path(model, plan, (known, modules))


def _matching_path(
    model: nn.Module, plan: _Plan, looked: tuple[Structure, list[Any]] | None = None
) -> list[Named]:  # fmt: skip
    """Return the modules whose path matches, from the cache if the structure of the model has not changed."""
    known, modules = structure(model)[::2] if looked is None else looked
    path = plan.address.path
    found = known.matches.get(path)
    if found is None:
        places = {id(module): place for place, module in enumerate(modules)}
        matching = _matching(model, walk(model), lambda name, _: plan.fits(name))
        found = known.matches[path] = [(name, places[id(module)]) for name, module in matching]
    return [(name, modules[place]) for name, place in found]


def _wrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the wrappers in a model."""
    return (module for _, module in walk(model, as_built=True)[0] if unwrapped(module) is not module)


def _filtered(model: nn.Module, fits: Callable[[str, nn.Module], object], site: DefaultSite) -> list[Point]:
    modules = _matching(model, walk(model), fits)
    return _returns(modules, None, explicit=False) if site is Site.RETURN else _inside(modules, _IN, explicit=False)


_IN = parse(":in")


def _returns(modules: Sequence[Named], call: int | CallRange | None, *, explicit: bool) -> list[Point]:
    paths = [path for path, _ in modules]
    addresses = _escaped(paths)
    site = Site.RETURN
    return [
        Point(address or ":return", site, module, path, None, call, explicit)
        for address, (path, module) in zip(addresses, modules, strict=True)
    ]


def _escaped(paths: list[str]) -> list[str]:
    # One search in the joined text: names with special characters are rare, and escaping each name is slow.
    return [escape(path) for path in paths] if ESCAPED.search("".join(paths)) else paths


def _inside(modules: Sequence[Named], address: Address, *, explicit: bool) -> list[Point]:
    escaped = _escaped([path for path, _ in modules])
    points: list[Point] = []
    for path_text, (path, module) in zip(escaped, modules, strict=True):
        for site, name, spot in sites_inside(module, address.inner, literal=explicit):
            tail = "" if site is Site.RETURN and path else f":{name or site.value}"
            points.append(Point(path_text + tail, site, module, path, name, address.call, explicit, spot))
    return points


def _modules_and_tensors(
    model: nn.Module,
    walked: tuple[list[Named], list[Named]],
    fits: Callable[[str], object],
    fits_name: Callable[[str], object],
) -> list[Point]:
    """Return the matches under any name, in the model's order. Each parameter follows the module that owns it."""
    tensors = _fitting(all_names(walked), fits, fits_name)
    modules = _matching(model, walked, lambda path, _: fits(path))
    if not tensors and not modules:
        tensors = _fitting(true_names(model), fits, fits_name)
    if not tensors:
        return _returns(modules, None, explicit=False)
    points, chosen = list[Point](), {id(module) for _, module in modules}
    for item in walked[0]:
        if id(item[1]) in chosen:
            points += _returns([item], None, explicit=False)
        for entry in named_tensors([item]):
            if id(entry.tensor) in tensors:
                tensors.remove(id(entry.tensor))  # a tied parameter appears under its first name only
                points.append(_tensor_point(entry))
    return points


def _fitting(names: list[Named], fits: Callable[[str], object], fits_name: Callable[[str], object]) -> set[int]:
    return {id(entry.tensor) for entry in named_tensors(names, fits_name) if fits(entry.full)}


def _tensor_point(entry: NamedTensor) -> Point:
    return Point(escape(entry.full), Site.PARAMETER, entry.owner, entry.path, entry.name)


def _no_glob(model: nn.Module, text: str, address: Address) -> AddressError:
    deeper = Address((*_EVERY, *address.path), address.inner, address.call)
    fits = _fits(deeper.path)
    further = sum(1 for path, _ in walk(model)[0] if fits(path))
    fix = f"It is matched from the root; '{deeper}' matches {further} module{'s' * (further != 1)}." if further else ""
    return no_match(model, repr(text), str(Address(address.path)), fix)


def _no_glob_inside(text: str, modules: list[Named], address: Address) -> AddressError:
    names = list(dict.fromkeys(name for _, module in modules for name in arguments(module).names))
    wanted = address.inner[0].name.literal
    near = nearest(wanted or "", names) or names
    return AddressError(
        f"{text!r}: none of the {len(modules)} modules has this name in its forward.\n"
        f"Their arguments include {listed(near)}."
    )


# --- objects ----------------------------------------------------------------------------------------------------------


def _object(model: nn.Module, module: nn.Module, site: DefaultSite) -> list[Point]:
    module = unwrapped(module)
    named = [item for item in walk(model)[0] if item[1] is module]
    if not named:
        what = f"The {type(module).__name__} given as a selector"
        raise not_part_of(model, what, "Pass a module of this model (not of a copy), or its address.")
    if site is Site.RETURN:
        return _returns(named, None, explicit=True)
    return _some(_inside(named, _IN, explicit=True), lambda: no_such_name(f"{named[0][0]}:in", module, _IN.inner))


def _own_point(model: nn.Module, point: Point) -> Point:
    """Return the point after checking that it belongs to this model."""
    if find(model, point.path) is point.module:
        return point
    names = first_names(model)
    if id(point.module) not in names:
        fix = f"Select it by its address, {str(point)!r}."
        raise not_part_of(model, f"The point {str(point)!r}, selected on another model,", fix)
    return _renamed(model, point, names)


def _renamed(model: nn.Module, point: Point, names: dict[int, str]) -> Point:
    tensor = point.tensor
    subject = point.module if tensor is None else tensor
    first = names.get(id(subject), "")
    if first == (point.path if tensor is None else _full(point)):
        return point
    if tensor is None:
        tail = "" if point.site is Site.RETURN and first else f":{point.name or point.site.value}"
        return replace(point, address=escape(first) + tail, path=first)
    path, _, name = first.rpartition(".")
    owner = find(model, path) or point.module
    return replace(point, address=escape(first), module=owner, path=path, name=name)


def _full(point: Point) -> str:
    return f"{point.path}.{point.name}" if point.path else f"{point.name}"


def merged(found: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """Return all points in order, each once. A point is explicit if any of its duplicates is."""
    kept: dict[tuple[object, ...], Point] = {}
    for point in (point for points in found for point in points):
        subject = point.module if (tensor := point.tensor) is None else tensor
        name = None if tensor is not None else point.name
        key = (id(subject), point.site, name, point.call)
        before = kept.get(key)
        kept[key] = point if before is None else _both(before, point)
    return tuple(kept.values())


def _both(before: Point, after: Point) -> Point:
    if before.explicit == after.explicit:
        return before
    # The point from the walk has the first name. The written one may have another name.
    return replace(after if before.explicit else before, explicit=True)
