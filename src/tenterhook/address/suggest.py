"""Error messages for unknown names: the part that was found, the nearest names, and the fix."""

# This file reads a module's own dictionaries: the public methods are slower and skip entries that are None.

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from tenterhook.address.grammar import escape
from tenterhook.address.walk import all_names, named_tensors, walk
from tenterhook.errors import AddressError
from tenterhook.pytorch.module_calls import buffers_of, parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

__all__ = ["listed", "nearest", "no_match", "no_module_of_class", "not_part_of", "unknown_name"]

_SEE_ALL = "Print tenterhook.points(model) to see every name."
_NEAR_ENOUGH = 0.6
_NUMBERS, _GLOB = re.compile(r"\d+"), re.compile(r"[*?\[{]")
# A correct name from deeper in the tree is as good a guess as a full name with a small typing error.
_TAIL_WORTH = 0.98
_NUMBER_WORTH = 0.7  # The same holds for a name with another number, however short it is.


def nearest(wanted: str, names: Iterable[str], limit: int = 5) -> list[str]:
    """Return the names that are most similar to ``wanted``, best first.

    Full names and their ends are compared, so that a part of a path finds the full path.

    >>> nearest("conv2", ["layer4.0.bn2", "layer4.1.conv2", "fc"])
    ['layer4.1.conv2']
    >>> nearest("b9", ["b1", "b2", "fc"])
    ['b1', 'b2']
    """
    likeness = _likeness(wanted)
    depth = wanted.count(".") + 1
    kind = _NUMBERS.sub("0", _GLOB.split(wanted, maxsplit=1)[0].rstrip("."))
    scored = []
    for name in dict.fromkeys(names):
        tail = ".".join(name.split(".")[-depth:])
        score = max(likeness(name), _TAIL_WORTH * likeness(tail) if tail != name else 0.0)
        if score < _NUMBER_WORTH and _NUMBERS.sub("0", name) == kind:
            score = _NUMBER_WORTH
        if score >= _NEAR_ENOUGH:
            scored.append((-score, name))
    scored.sort(key=lambda entry: entry[0])
    return [name for _, name in scored[:limit]]


class _likeness:  # noqa: N801  # called like a function; a class only for its cache
    """The similarity of a name to the wanted one, from 0 to 1.

    Cached, because a large model repeats the ends of names.
    """

    def __init__(self, wanted: str) -> None:
        from difflib import SequenceMatcher  # imported on use: only errors need it

        self.matcher = SequenceMatcher(None, "", wanted, autojunk=False)
        self.known: dict[str, float] = {}

    def __call__(self, name: str) -> float:
        if name not in self.known:
            self.matcher.set_seq1(name)
            possible = min(self.matcher.real_quick_ratio(), self.matcher.quick_ratio())
            self.known[name] = self.matcher.ratio() if possible >= _NEAR_ENOUGH else 0.0
        return self.known[name]


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Return names in one line. A long list ends with the number of names that are left out.

    >>> listed(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def unknown_name(model: nn.Module, text: str, names: Sequence[str], depth: int, reached: nn.Module) -> AddressError:
    """Return the error for a path whose first ``depth`` names lead to ``reached``, which lacks the next name."""
    place = repr(".".join(names[:depth])) if depth else "it"
    owner = f" ({type(reached).__name__})" if depth else ""
    why = f"{place}{owner} has no {names[depth]!r}"
    if names[depth] in parameters_of(reached) or names[depth] in buffers_of(reached):
        why = f"{place}{owner} has {names[depth]!r}, which is None" if depth + 1 == len(names) else f"{why} module"
    missing = f"{type(model).__name__} has no {text!r}"
    plain = depth == 0 and why == f"it has no {text!r}"
    return _error(f"{missing}." if plain else f"{missing}: {why}.", _near(model, ".".join(names)))


def no_match(model: nn.Module, what: str, text: str, fix: str = "") -> AddressError:
    """Return the error for a selector, ``what``, without a match. ``text`` is used to find the nearest names."""
    return _error(f"{type(model).__name__} has no match for {what}.", _near(model, text), fix)


def no_module_of_class(model: nn.Module, wanted: type[nn.Module]) -> AddressError:
    """Return the error for a class that no module of the model has."""
    classes = Counter(type(module).__name__ for _, module in walk(model)[0])
    near = nearest(wanted.__name__, classes) or [name for name, _ in classes.most_common(5)]
    known = listed([f"{name} ({classes[name]}×)" for name in near])
    return AddressError(
        f"{type(model).__name__} has no module of class {wanted.__module__}.{wanted.__qualname__}.\n"
        f"It has {known}.\n{_SEE_ALL}"
    )


def not_part_of(model: nn.Module, what: str, fix: str) -> AddressError:
    """Return the error for an object of another model."""
    return AddressError(f"{what} is not part of this {type(model).__name__}.\n{fix}")


def _near(model: nn.Module, text: str) -> list[str]:
    modules = all_names(walk(model))
    known = [path for path, _ in modules if path] + [entry.full for entry in named_tensors(modules)]
    return [escape(name) for name in nearest(text, known)]


def _error(what: str, near: Sequence[str], fix: str = "") -> AddressError:
    guess = f"Did you mean {listed(near)}?" if near else ""
    return AddressError("\n".join(line for line in (what, fix, guess, _SEE_ALL) if line))
