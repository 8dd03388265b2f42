"""The names in a model: its modules, its parameters and buffers, and the additional names of shared ones.

Wrappers are transparent: a wrapper that ``torch.compile``, data parallelism, FSDP or peft adds has no name here, and
the module inside has the name that it has without the wrapper.
"""

# This file reads a module's own dictionaries: the public methods are slower and skip entries that are None.

from __future__ import annotations

from operator import call
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from tenterhook._model_table import ModelTable
from tenterhook.address.grammar import escape
from tenterhook.address.point import Site, own_tensor
from tenterhook.pytorch.module_calls import buffers_of, children_of, parameters_of
from tenterhook.pytorch.wrappers import (
    WRAPPED_NAMES,
    has_wrapped_name,
    unwrapped,
    wrapped_module,
    wrapped_name,
    wrappers_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from tenterhook.address.found_points import Remembered
    from tenterhook.address.point import Point

__all__ = [
    "Children",
    "Looked",
    "Named",
    "Structure",
    "aliases",
    "all_names",
    "find",
    "first_names",
    "last_structure",
    "named_children",
    "named_tensors",
    "structure",
    "through_wrappers",
    "true_names",
    "walk",
    "with_wrappers",
    "wrappers_at",
]

Named = tuple[str, "nn.Module"]


class NamedTensor(NamedTuple):
    """A parameter or a buffer under one of its names."""

    path: str
    owner: nn.Module
    name: str
    tensor: Tensor

    @property
    def full(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def walk(model: nn.Module, *, as_built: bool = False) -> tuple[list[Named], list[Named]]:
    """Return every module under its first name, in the order of ``named_modules``, and the additional names.

    Modules below an additional name are not listed again. A wrapper is not listed: the module inside takes its place.
    With ``as_built``, wrappers are ordinary modules. The result is cached until the structure of the model changes.
    """
    if as_built:
        return _walk(model, as_built=True)
    known = _known.get(ref(model))
    found = known.again(model) if known is not None else None
    if found is None:
        found = _walk(model, as_built=False)
        _known.put(model, Structure(model, found))
    return found


def _walk(model: nn.Module, *, as_built: bool) -> tuple[list[Named], list[Named]]:
    firsts: list[Named] = []
    others: list[Named] = []
    seen: set[int] = set()
    stack: list[Named] = [("", model)]
    while stack:
        item = stack.pop()
        path, module = item
        if id(module) in seen:
            others.append(item)
            continue
        seen.add(id(module))
        if children := children_of(module):
            prefix = f"{path}." if path else ""
            if not as_built and wrapped_name(module) is not None:
                stack += [(prefix + each, child) for each, child in reversed(_beside(module))]
                stack.append((path, wrapped_module(module)))
                continue
            stack += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
        firsts.append(item)
    return firsts, others


def _beside(wrapper: nn.Module) -> list[Named]:
    """Return the children of a wrapper except the wrapped module and names that the wrapped module also has."""
    inner = children_of(unwrapped(wrapper))
    own, wrapped = children_of(wrapper), wrapped_name(wrapper)
    return [(name, child) for name, child in own.items() if child is not None and name != wrapped and name not in inner]


def named_children(module: nn.Module) -> list[Named]:
    """Return the named children of a module, or of the module inside a wrapper. Some may be wrappers themselves."""
    own = [(name, child) for name, child in children_of(unwrapped(module)).items() if child is not None]
    return own + [item for wrapper in wrappers_of(module) for item in _beside(wrapper)]


class Structure:
    """The modules of a model, their positions and their names. It keeps no module alive.

    A module is identified by its position in the list of all children: first the model, then its children, then the
    children of each module that has any, in the order of that list.
    """

    __slots__ = ("_alive", "_firsts", "_gone", "_leaves", "_others", "_parents", "children", "globs", "matches")

    def __init__(self, model: nn.Module, walked: tuple[list[Named], list[Named]]) -> None:
        modules: list[nn.Module | None] = [model]
        places: dict[nn.Module, int] = {}
        parents: list[nn.Module] = []
        self._leaves: list[int] = []
        for place, module in enumerate(modules):  # The list grows during the loop.
            if module is not None and module not in places:
                places[module] = place
                children = children_of(module)
                if children:
                    parents.append(module)
                    modules += children.values()
                else:
                    self._leaves.append(place)
        # The root is not referred to here, because a weak reference to it would be one more object to look at.
        self._parents = [ref(module) for module in parents if module is not model]
        self.children = Children.of(parents)
        # An id may be reused after its module was garbage-collected. The structure is valid only if this list is empty.
        self._gone: list[Any] = []
        self._alive = [ref(module, self._gone.append) for module in places]
        self.globs: dict[str, Remembered | None] = {}
        """the results of globs in this structure; None for points of other kinds"""
        self.matches: dict[Any, list[tuple[str, int]]] = {}
        """the paths and positions of the modules that match a pattern of paths"""
        self._firsts, self._others = [[(path, places[module]) for path, module in part] for part in walked]

    def look(self, model: nn.Module) -> tuple[Looked, list[Any]] | None:
        """Return what was looked at and the modules, or None if the structure of the model has changed."""
        if self._gone:
            return None
        parents = [model, *map(call, self._parents)] if children_of(model) else []
        looked = self.children.look(parents)
        if looked is None:
            return None
        modules: list[Any] = [model, *looked.modules]
        if any(map(children_of, map(modules.__getitem__, self._leaves))):
            return None
        return looked, modules

    def again(self, model: nn.Module) -> tuple[list[Named], list[Named]] | None:
        """Return the cached result of the walk, or None if the structure of the model has changed."""
        looked = self.look(model)
        if looked is None:
            return None
        modules = looked[1]
        firsts, others = ([(path, modules[place]) for path, place in part] for part in (self._firsts, self._others))
        return firsts, others


class Children:
    """The names and identities of the children of some modules, to see whether they have changed."""

    __slots__ = ("_ids", "_names")

    def __init__(self, names: list[list[str]], ids: list[int]) -> None:
        self._names, self._ids = names, ids

    @classmethod
    def of(cls, parents: Sequence[nn.Module]) -> Children:
        """Return the children that these modules have now."""
        tables = [children_of(parent) for parent in parents]
        return cls([[*table.keys()] for table in tables], [id(child) for table in tables for child in table.values()])

    # The children of a scripted module are in a table that has the methods of a dict, and is none.

    def look(self, parents: Sequence[Any]) -> Looked | None:
        """Return the children of these modules, or None if they have changed. A dead module is None."""
        modules: list[Any] = []
        try:
            tables = list(map(children_of, parents))
        except AttributeError:
            return None
        for table, names in zip(tables, self._names, strict=False):  # A model without children has no parents.
            if [*table.keys()] != names:
                return None
            modules += table.values()
        return Looked(tables, modules) if list(map(id, modules)) == self._ids else None


class Looked(NamedTuple):
    """The tables of children that were looked at, and the modules in them. It keeps the modules alive."""

    tables: list[dict[str, nn.Module | None]]
    modules: list[Any]

    @property
    def is_unchanged(self) -> bool:
        """True if the tables still hold the same modules."""
        now: list[Any] = []
        for table in self.tables:
            now += table.values()
        return now == self.modules


_known: ModelTable[Structure] = ModelTable()


def structure(model: nn.Module) -> tuple[Structure, Looked, list[Any]]:
    """Return the structure of a model, what was looked at, and the modules by their positions.

    The structure is the same object until the model changes.
    """
    known = _known.get(ref(model))
    looked = known.look(model) if known is not None else None
    if known is None or looked is None:
        known = Structure(model, _walk(model, as_built=False))
        _known.put(model, known)
        looked = known.look(model)
        assert looked is not None  # noqa: S101  It was built from this model just now.
    return known, *looked


def last_structure(model: nn.Module) -> Structure | None:
    """Return the structure from the last walk of a model, without checking whether it has changed."""
    return _known.get(ref(model))


def all_names(walked: tuple[list[Named], list[Named]], *, as_built: bool = False) -> list[Named]:
    """Return every name of every module, first names before additional ones.

    The names below an additional name are listed too. A module that contains itself is not followed again.
    """
    firsts, others = walked
    names = list(firsts)
    for path, module in others:
        below = walk(module, as_built=as_built)
        names += [(f"{path}.{rest}" if rest else path, inner) for part in below for rest, inner in part]
    return names


def named_tensors(names: list[Named], fits: Callable[[str], object] = bool) -> list[NamedTensor]:
    """Return the parameters and buffers of these modules whose own name ``fits``, under every name in ``names``."""
    return [
        NamedTensor(path, module, name, tensor)
        for path, module in names
        for own in (parameters_of(module), buffers_of(module))
        for name, tensor in own.items()
        if tensor is not None and fits(name)
    ]


def first_names(model: nn.Module) -> dict[int, str]:
    """Return the first name of every module, parameter and buffer, by the ``id`` of the object."""
    firsts, _ = walk(model)
    names = {id(module): path for path, module in firsts}
    for entry in named_tensors(firsts):
        names.setdefault(id(entry.tensor), entry.full)
    return names


def find(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module of that name, or None. Wrappers are transparent, and their prefixes are accepted."""
    if not path:
        return unwrapped(model)
    module: Any = model
    names = path.split(".")
    try:
        for name in names:
            children = children_of(module)
            if type(children) is dict and children.keys().isdisjoint(WRAPPED_NAMES):  # As for most modules.
                module = children[name]
            else:
                module = (children_of(unwrapped(module)) if has_wrapped_name(children) else children)[name]
    except (KeyError, AttributeError):  # The name is missing, or the child is None.
        found = through_wrappers(model, names)
        return found[0] if found is not None and found[1] is None else None
    return unwrapped(module) if module is not None else None


def through_wrappers(model: nn.Module, names: Sequence[str]) -> tuple[nn.Module, str | None, tuple[str, ...]] | None:
    """Follow a list of names that may include prefixes of wrappers, such as ``_orig_mod`` and ``module``.

    Return the module, the name of its parameter or buffer if the last name is one, and the plain names of the module.
    Return None if there is no such name. A child of the model is preferred to a wrapper's prefix.
    """
    return next(_ways(model, tuple(names), prefixed=False), None)


def _ways(
    module: nn.Module, names: tuple[str, ...], *, prefixed: bool
) -> Iterator[tuple[nn.Module, str | None, tuple[str, ...]]]:
    """Yield every way to follow names from a module. ``prefixed`` is true if a prefix has led to this module."""
    wrappers, inner = list(wrappers_of(module)), unwrapped(module)
    if not names:
        yield inner, None, ()
        return
    name, rest = names[0], names[1:]
    plain = [(child, (name,), False) for own, child in named_children(module) if own == name]
    prefix = [(wrapped_module(wrapper), (), True) for wrapper in wrappers if wrapped_name(wrapper) == name]
    for child, kept, through in [*prefix, *plain] if prefixed else [*plain, *prefix]:
        yield from ((found, tensor, (*kept, *below)) for found, tensor, below in _ways(child, rest, prefixed=through))
    if not rest:
        yield from ((owner, name, ()) for owner in (inner, *wrappers) if own_tensor(owner, name) is not None)


def wrappers_at(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the wrappers around the module of that name, outermost first."""
    module: nn.Module | None = model
    for name in path.split(".") if path else ():
        module = _child(module, name) if module is not None else None
    return list(wrappers_of(module)) if module is not None else []


def _child(module: nn.Module, name: str) -> nn.Module | None:
    """Return one of the named children, without a list of all of them."""
    own = children_of(unwrapped(module))
    found: nn.Module | None = own[name] if name in own else None  # noqa: SIM401  As for the table of a ScriptModule.
    if found is not None:
        return found
    return dict(item for wrapper in wrappers_of(module) for item in _beside(wrapper)).get(name)


def with_wrappers(model: nn.Module) -> list[Named]:
    """Return every module and wrapper under its first plain name. A wrapper has the name of the module inside."""
    names = {id(module): path for path, module in walk(model)[0]}
    return [(names.get(id(unwrapped(module)), path), module) for path, module in walk(model, as_built=True)[0]]


def true_names(model: nn.Module) -> list[Named]:
    """Return every module inside wrappers under its names in ``named_modules``, including prefixes."""
    walked = all_names(walk(model, as_built=True), as_built=True)
    return [(path, unwrapped(module)) for path, module in walked]


def aliases(model: nn.Module, point: Point) -> tuple[str, ...]:
    """Return every address of the module or tensor at ``point``, its own included. The first is the canonical one.

    >>> import torch
    >>> from tenterhook.address import resolve
    >>> model = torch.nn.Module()
    >>> model.encoder = model.decoder = torch.nn.Linear(2, 2)
    >>> aliases(model, *resolve(model, ["decoder"]))
    ('encoder', 'decoder')
    """
    names = all_names(walk(model))
    if point.site is Site.PARAMETER:
        wanted = point.tensor
        found = [entry.full for entry in named_tensors(names) if entry.tensor is wanted]
        return tuple(dict.fromkeys(map(escape, found)))
    tail = point.address[len(escape(point.path)) :] if point.path else point.address
    tail = "" if tail == ":return" else tail
    found = [path for path, module in names if module is point.module]
    return tuple(dict.fromkeys(escape(path) + tail or ":return" for path in found))
