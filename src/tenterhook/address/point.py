"""A point: one place in one model where a value passes."""

# This file reads a module's own dictionaries: the public methods are slower and skip entries that are None.

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from tenterhook._text import printable
from tenterhook.address.grammar import CallRange
from tenterhook.pytorch.module_calls import buffers_of, parameters_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tenterhook.address.inner_points import InnerPlaces
    from tenterhook.address.places import Place

__all__ = ["Meaning", "Point", "Site", "own_tensor"]


class Meaning(NamedTuple):
    """The meaning of a value that a call takes or computes: an attention call, or the call that returns latents."""

    name: str
    head: int | None
    """one head or latent only; None for all of them"""
    places: tuple[Place, ...]
    """the places of the call in the source"""
    dimension: int | None = None
    """the dimension that ``head`` selects in the result of the call; None for an attention call"""


class Site(enum.Enum):
    """The ways in which a point is reached."""

    __hash__ = object.__hash__  # The members are singletons; Enum hashes their names, in Python code.

    RETURN = "return"
    """the output of a module"""
    IN = "in"
    """the first argument of a module"""
    ARGUMENT = "argument"
    """an argument of a module's ``forward``, by name"""
    PARAMETER = "parameter"
    """a parameter or a buffer"""
    VARIABLE = "variable"
    """a variable, or the result of a call, inside a module's ``forward``"""


# Not frozen: creating a frozen dataclass takes five times as long, and a glob creates one point for each module.
# ``Final`` makes the type checker reject assignments.
@dataclass(slots=True, eq=False)
class Point:
    """One place in a model where a value passes. Two points are equal if their addresses and calls are equal."""

    address: Final[str]
    """canonical text, without the call"""
    site: Final[Site]
    module: Final[nn.Module]
    """the module that is called, or that owns the parameter"""
    path: Final[str]
    """the module's name, as in ``named_modules``"""
    name: Final[str | None] = None
    """the name of the argument or the parameter"""
    call: Final[int | CallRange | None] = None
    """the call or the range of calls; None for all calls"""
    explicit: Final[bool] = False
    """selected by a literal address or as a module object, not by a glob, class, regex or predicate"""
    spot: Final[InnerPlaces | None] = None
    """the places inside ``forward``, for a variable or a call"""
    meaning: Final[str | None] = None
    """the name after ``@``, for a point that was selected by its meaning"""

    def __str__(self) -> str:
        return self.address if self.call is None else f"{self.address}#{self.call}"

    def __repr__(self) -> str:
        return printable(f"<Point {self} ({self.site.value} of {type(self.module).__name__})>")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Point):
            return NotImplemented
        return self.address == other.address and self.call == other.call

    def __hash__(self) -> int:
        return hash((self.address, self.call))

    @property
    def is_plain_output(self) -> bool:
        """True at the output of all calls of a module, under the module's own name."""
        return self.site is Site.RETURN and self.call is None and self.meaning is None

    def has_call(self, call: int) -> bool:
        """Return whether the point is meant in a call, given by its number."""
        wanted = self.call
        return wanted is None or (call in wanted if isinstance(wanted, CallRange) else call == wanted)

    @property
    def tensor(self) -> Tensor | None:
        """The parameter or buffer at this point; None at every other site, and if it was removed."""
        if self.site is not Site.PARAMETER or self.name is None:
            return None
        return own_tensor(self.module, self.name)


def own_tensor(module: nn.Module, name: str) -> Tensor | None:
    """Return a module's own parameter or buffer of that name, or None if it is missing or None."""
    for own in (parameters_of(module), buffers_of(module)):
        if name in own and (tensor := own[name]) is not None:
            return tensor  # type: ignore[no-any-return]
    return None
