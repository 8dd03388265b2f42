"""The names that a model has: its modules, its parameters and buffers, and the further names of what is shared."""

# a module's own tables have no public door that is as quick, or that keeps None apart

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tenterhook.address.grammar import escape
from tenterhook.address.point import Site
from tenterhook.pytorch.module_calls import buffers_of, children_of, parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from tenterhook.address.point import Point

__all__ = ["Named", "Shape", "aliases", "all_names", "find", "first_names", "named_tensors", "walk"]

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


def walk(model: nn.Module) -> tuple[list[Named], list[Named]]:
    """Every module under its first name, in the order of ``named_modules``; and the further names met on the way.

    What lies below a further name is not entered. This is the price of every glob, hence the plain loop:
    ``named_modules`` is a chain of generators and takes several times as long.
    """
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
        firsts.append(item)
        if children := children_of(module):
            prefix = f"{path}." if path else ""
            stack += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
    return firsts, others


class Shape:
    """Which modules stand where in a model."""

    __slots__ = ("_children", "_parents", "ids")

    def __init__(self, model: nn.Module) -> None:
        self.ids: set[int] = set()
        self._parents: list[nn.Module] = []
        self._children: list[tuple[nn.Module | None, ...]] = []
        stack: list[nn.Module | None] = [model]
        while stack:
            module = stack.pop()
            if module is not None and id(module) not in self.ids:
                self.ids.add(id(module))
                self._parents.append(module)
                children = tuple(children_of(module).values())
                self._children.append(children)
                stack += children

    def holds(self) -> bool:
        """Whether the same modules stand in the same places."""
        return [tuple(children_of(module).values()) for module in self._parents] == self._children


def all_names(walked: tuple[list[Named], list[Named]]) -> list[Named]:
    """Every name of every module, first names before further ones.

    Below a further name the same names are listed again, but a module that contains itself is not followed round.
    """
    firsts, others = walked
    names = list(firsts)
    for path, module in others:
        below = walk(module)
        names += [(f"{path}.{rest}" if rest else path, inner) for part in below for rest, inner in part]
    return names


def named_tensors(names: list[Named], fits: Callable[[str], object] = bool) -> list[NamedTensor]:
    """The parameters and buffers of these modules whose own name ``fits``, under every name they have among them."""
    return [
        NamedTensor(path, module, name, tensor)
        for path, module in names
        for own in (parameters_of(module), buffers_of(module))
        for name, tensor in own.items()
        if tensor is not None and fits(name)
    ]


def first_names(model: nn.Module) -> dict[int, str]:
    """The first name of every module, parameter and buffer, by the identity of the object."""
    firsts, _ = walk(model)
    names = {id(module): path for path, module in firsts}
    for entry in named_tensors(firsts):
        names.setdefault(id(entry.tensor), entry.full)
    return names


def find(model: nn.Module, path: str) -> nn.Module | None:
    """The module of that name, or None."""
    module: Any = model
    try:
        for name in path.split(".") if path else ():
            module = children_of(module)[name]
    except (KeyError, AttributeError):  # There is none of that name, or None stands there.
        return None
    return module  # type: ignore[no-any-return]


def aliases(model: nn.Module, point: Point) -> tuple[str, ...]:
    """Every address of what ``point`` stands for, its own included; the first is the canonical one.

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
