"""Points by what they mean: ``h.3.attn@pattern`` is the attention pattern, whatever the source calls it.

An attention module is known by the call that computes the attention in its ``forward``: ``attention_interface(...)``,
as in transformers, or ``scaled_dot_product_attention(...)``. A layer is known by the names of its attention and its
MLP. For other modules, :func:`register_meaning` says which address a meaning has. While a dictionary is spliced into
the stream at a module, that module also has the meanings that :func:`give_meanings` added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from tenterhook.address.globs import name_regex
from tenterhook.address.grammar import CallRange, Inner, Pattern, escape, parse
from tenterhook.address.inner_points import InnerPlaces, sites_inside
from tenterhook.address.point import Meaning, Point, Site
from tenterhook.address.suggest import listed
from tenterhook.address.walk import find, walk
from tenterhook.errors import AddressError, NoSource

__all__ = [
    "ATTENTION_CHILDREN", "MLP_CHILDREN", "Beside", "give_meanings", "meaning_points", "no_meaning",
    "output_projection", "register_meaning", "take_meanings",
]  # fmt: skip

ATTENTION_CALLS = ("attention_interface", "scaled_dot_product_attention")
ATTENTION_MEANINGS = ("q", "k", "v", "scores", "pattern", "z", "result")  # "result" needs a projection.
SPLICED = ("latents", "error")  # Meanings of a module where a dictionary is spliced into the stream.
LAYER_MEANINGS = ("resid_pre", "resid", "attn_out", "mlp_out")

# Names of the attention and of the MLP in a layer; the first that exists is used. BERT's "attention" contains the
# residual connection and the norm, so its dense layer is named.
ATTENTION_CHILDREN = (
    "self_attn", "attn", "self_attention", "attention.output.dense", "attention.o_proj", "attention",
    "layer.0.SelfAttention", "mixer",
)  # fmt: skip
MLP_CHILDREN = (
    "mlp", "feed_forward", "ffn", "block_sparse_moe", "layer.1.DenseReluDense", "output.dense", "fc2", "intermediate",
)  # fmt: skip
PROJECTIONS = (
    "o_proj", "c_proj", "out_proj", "dense", "wo", "proj", "to_out.0", "o", "output.dense", "query_dense",
    "attention.out_proj",
)  # fmt: skip

_registered: WeakKeyDictionary[type[nn.Module], dict[str, str]] = WeakKeyDictionary()


class Beside(NamedTuple):
    """A module beside another one, whose output is a meaning of that other module."""

    path: str
    """its path, relative to the other module"""
    module: nn.Module
    call: str | None = None
    """the call in its ``forward`` whose result can be indexed along the last dimension; None if it has no index"""


_given: WeakKeyDictionary[nn.Module, Mapping[str, Beside]] = WeakKeyDictionary()


class _Found(NamedTuple):
    """A meaning of a module: the place inside its forward, or an address relative to the module."""

    name: str
    spot: InnerPlaces | None = None
    relative: str = ""
    beside: Beside | None = None


def register_meaning(kind: type[nn.Module], name: str, address: str) -> None:
    """Give modules of a class a meaning: an address relative to the module, for ``@name``.

    >>> from torch import nn
    >>> import tenterhook as th
    >>> class Attention(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.softmax = nn.Softmax(-1)
    ...
    ...     def forward(self, x):
    ...         return self.softmax(x @ x.mT) @ x
    >>> th.register_meaning(Attention, "pattern", "softmax")
    >>> print(*th.points(nn.Sequential(Attention()), "0@pattern"))
    0@pattern

    Args:
        kind: the class of the modules; subclasses have the meaning too.
        name: the name after ``@``, a Python identifier.
        address: the address of the value, relative to the module: ``"softmax"`` is the output of a child, ``":in"`` its
            first argument, ``":attn_weights"`` a variable in its ``forward``, ``":softmax()"`` the result of a call.

    Raises:
        AddressError: the name or the address is not valid.
    """
    is_class: bool = isinstance(kind, type)
    if not is_class or not issubclass(kind, nn.Module):
        raise AddressError(f"register_meaning() takes a class of modules; got {kind!r:.80}")
    if not name.isidentifier():
        raise AddressError(f"the name of a meaning is a Python identifier, such as 'pattern'; got {name!r:.80}")
    if not parse(address).is_literal or parse(address).meaning is not None:
        raise AddressError(f"{address!r} is not one address: a meaning has no glob and no other meaning in it")
    _registered.setdefault(kind, {})[name] = address


def meaning_points(
    path: str, module: nn.Module, wanted: Pattern, head: int | None, call: int | CallRange | None, *, explicit: bool
) -> list[Point]:
    """Return the points of a module that a name after ``@`` selects."""
    fits = re.compile(name_regex(wanted)).fullmatch
    index = "" if head is None else f"[{head}]"
    points: list[Point] = []
    for found in _meanings(module, wanted.literal):
        if fits(found.name) is None:
            continue
        address = f"{escape(path)}@{found.name}{index}"
        if found.beside is not None:
            points.append(_beside(path, found.name, found.beside, head, call, explicit=explicit))
        elif found.spot is not None:
            spot = InnerPlaces(
                found.spot.function, (), found.spot.route, meaning=Meaning(found.name, head, found.spot.places)
            )
            name = f"@{found.name}{index}"
            points.append(Point(address, Site.VARIABLE, module, path, name, call, explicit, spot, found.name))
        else:
            if head is not None:
                raise AddressError(f"{address!r}: @{found.name} has no heads; write {address[: -len(index)]!r}")
            points += _relative(path, module, found, address, call, explicit=explicit)
    return points


def give_meanings(module: nn.Module, meanings: Mapping[str, Beside]) -> None:
    """Give one module meanings that are outputs of modules beside it, until :func:`take_meanings`."""
    _given[module] = meanings


def take_meanings(module: nn.Module) -> None:
    """Remove the meanings that :func:`give_meanings` gave a module."""
    _given.pop(module, None)


def _beside(
    path: str, name: str, beside: Beside, index: int | None, call: int | CallRange | None, *, explicit: bool
) -> Point:
    """Return the point of a module beside another one: its output, or one index of the last dimension of it."""
    whole = f"{path}.{beside.path}" if path else beside.path
    text = f"{escape(path)}@{name}"
    if index is None:
        return Point(text, Site.RETURN, beside.module, whole, None, call, explicit, None, name)
    if beside.call is None:
        raise AddressError(f"'{text}[{index}]': @{name} has no index; write {text!r}, and at=th.at[..., {index}]")
    inner = (Inner(Pattern((beside.call,)), is_call=True),)
    spots = [each.spot for each in sites_inside(beside.module, inner, literal=True) if each.spot is not None]
    spot = InnerPlaces(spots[0].function, (), (), meaning=Meaning(name, index, spots[0].places, dimension=-1))
    text = f"{text}[{index}]"
    return Point(text, Site.VARIABLE, beside.module, whole, f"@{name}[{index}]", call, explicit, spot, name)


def _relative(
    path: str, module: nn.Module, found: _Found, address: str, call: int | CallRange | None, *, explicit: bool
) -> list[Point]:
    """Return the point of a meaning that has an address relative to its module."""
    parsed = parse(found.relative)
    below = ".".join(parsed.names or ())
    owner = find(module, below)
    if owner is None:
        return []
    whole = ".".join(part for part in (path, below) if part)
    return [
        Point(address, site, owner, whole, name, call, explicit, spot, found.name)
        for site, name, spot in sites_inside(owner, parsed.inner, literal=True)
    ]


def _meanings(module: nn.Module, name: str | None = None) -> Iterator[_Found]:
    """Yield the meanings of a module; with a name, at least the one of that name."""
    given = _given.get(module, {})
    yield from (_Found(each, beside=beside) for each, beside in given.items())
    own: dict[str, str] = {}
    for kind in reversed(type(module).__mro__ if _registered else ()):
        own |= _registered.get(kind, {})
    yield from (_Found(each, relative=address) for each, address in own.items() if each not in given)
    wanted = [each for each in ATTENTION_MEANINGS if name in (None, each) and each not in own]
    attention = _attention_places(module) if wanted else None
    if attention is not None:
        yield from (_Found(each, attention) for each in wanted if each != "result" or output_projection(module))
    if name is None or name in LAYER_MEANINGS:
        yield from (_Found(name, relative=address) for name, address in _of_layer(module).items() if name not in own)


def _attention_places(module: nn.Module) -> InnerPlaces | None:
    """Return the places of the call that computes the attention in a module's forward."""
    for name in ATTENTION_CALLS:
        try:
            found = sites_inside(module, (Inner(Pattern((name,)), is_call=True),), literal=False)
        except NoSource:
            return None
        places = [each.spot for each in found if each.spot is not None and each.spot.places]
        if places:
            return min(places, key=lambda spot: len(spot.route))
    return None


def _of_layer(module: nn.Module) -> dict[str, str]:
    """Return the meanings of a layer of a transformer, as addresses relative to it."""
    attention = next((name for name in ATTENTION_CHILDREN if _is_module(module, name)), None)
    mlp = next((name for name in MLP_CHILDREN if _is_module(module, name)), None)
    if attention is None or mlp is None:
        return {}
    inner = find(module, attention)
    projection = output_projection(inner) if inner is not None else None
    written = f"{attention}.{projection}" if projection else attention
    return dict(zip(LAYER_MEANINGS, (":in", ":return", written, mlp), strict=True))


def _is_module(module: nn.Module, name: str) -> bool:
    found = find(module, name)
    return found is not None and not isinstance(found, (nn.ModuleList, nn.ModuleDict))


def output_projection(attention: nn.Module) -> str | None:
    """Return the name of the child that projects the heads of an attention module to the residual stream."""
    return next((name for name in PROJECTIONS if find(attention, name) is not None), None)


def no_meaning(model: nn.Module, text: str, path: str, module: nn.Module, wanted: Pattern) -> AddressError:
    """Return the error for a module that does not have a meaning."""
    kind, own = type(module).__name__, [found.name for found in _meanings(module)]
    lines = [f"{text!r}: {kind} has no such meaning."]
    if own:
        lines.append(f"It has {listed([f'@{name}' for name in own])}.")
    name = wanted.literal
    if name in SPLICED:
        error = ", error=True" if name == "error" else ""
        lines.append(f"A splice gives it: with th.splice(model, {{{path!r}: dictionary}}{error}): ...")
        return AddressError("\n".join(lines))
    inside = f"{path}." if path else ""
    below = [
        f"{escape(each)}@{name}"
        for each, child in walk(model)[0]
        if each.startswith(inside) and each != path and any(found.name == name for found in _meanings(child))
    ]
    if below:
        lines.append(f"Did you mean {listed(below[:3])}?")
    else:
        lines.append(
            f'To give it one: th.register_meaning({kind}, "{name or "pattern"}", "<address relative to the module>").'
        )
    return AddressError("\n".join(lines))
