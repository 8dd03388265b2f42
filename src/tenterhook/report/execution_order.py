"""Order in which the values of a tape were produced."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tenterhook.address.globs import name_regex, path_regex
from tenterhook.address.grammar import Address, CallRange, Inner, parse
from tenterhook.address.suggest import listed, nearest
from tenterhook.errors import NotRecorded
from tenterhook.record.tape import Tape

__all__ = ["chosen", "gradient_order", "in_order", "with_call"]


def in_order(tape: Tape) -> list[str]:
    """Return the addresses of a tape in the order in which their values were produced.

    A file of an earlier version does not store the order, unless the command line wrote it. Then the result is the
    order in which the model is built, children before parents.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU()), torch.nn.Linear(2, 2))
    >>> with th.record(model, "**", "1:in") as tape:
    ...     _ = model(torch.ones(1, 2))
    >>> in_order(tape)
    ['0.0', '0', '1:in', '1', ':return']
    """
    if tape.is_ordered:
        return tape.in_order()
    noted = {text: place for place, text in enumerate(tape.notes.get("order", ()))}
    addresses = list(tape)
    if noted:
        last = len(noted)
        return sorted(addresses, key=lambda address: noted.get(with_call(address), last))
    return _inside_out(addresses)


def gradient_order(tape: Tape) -> list[str]:
    """Return the addresses of the gradients of a tape in the order of the backward pass.

    A tape without values (``values=False``) does not store the order. Then the result is the reverse of the order in
    which the model is built, children before parents.
    """
    places = {with_call(address): place for place, address in enumerate(reversed(in_order(tape)))}
    addresses = list(reversed(_inside_out(list(tape.grad))))
    return sorted(addresses, key=lambda address: places.get(with_call(address), len(places)))


def with_call(address: str) -> str:
    """Return an address with the number of its call.

    >>> with_call("fc"), with_call("fc#2")
    ('fc#0', 'fc#2')
    """
    head, hash_, call = address.rpartition("#")
    return address if hash_ and call.isdigit() and head else f"{address}#0"


def _inside_out(addresses: list[str]) -> list[str]:
    """Sort arguments before the children of a module, and its output after them. Otherwise keep the recorded order."""
    first: dict[tuple[str, ...], int] = {}
    keys = {}
    for place, address in enumerate(addresses):
        parsed = parse(address)
        names = parsed.names or ()
        for end in range(len(names) + 1):
            first.setdefault(names[:end], place)
        is_output = not parsed.inner
        # The key has one step for each level: the position of its first occurrence. The last step sorts before or after
        # the children.
        steps = [(first[names[:end]], 1) for end in range(1, len(names) + 1)]
        keys[address] = ([*steps, (len(addresses), 2)] if is_output else [*steps, (-1, 0)], place)
    return sorted(addresses, key=keys.__getitem__)


def chosen(tape: Tape, selectors: Sequence[str]) -> list[str]:
    """Return the addresses on a tape that match any of the selectors, by text only. Without selectors, return all."""
    if not selectors:
        return list(tape)
    addresses = {address: parse(address) for address in tape}
    found: dict[str, None] = {}
    for selector in selectors:
        wanted = parse(selector)
        fit = [address for address, parsed in addresses.items() if _fits(wanted, parsed)]
        if isinstance(wanted.call, int) and wanted.call < 0:
            fit = _from_the_end(fit, addresses, wanted.call)
        if not fit:
            near = nearest(selector, addresses)
            hint = f"Did you mean {listed(near)}?" if near else f"It has {listed(list(addresses)[:5])}."
            raise NotRecorded(f"{selector!r} matches nothing on this tape.\n{hint}")
        found |= dict.fromkeys(fit)
    return [address for address in addresses if address in found]


def _from_the_end(fit: list[str], addresses: Mapping[str, Address], call: int) -> list[str]:
    """Return, for each point among these addresses, the call with this negative number, if the tape has it."""
    calls: dict[Address, list[str]] = {}
    for address in fit:
        calls.setdefault(replace(addresses[address], call=None), []).append(address)
    return [made[call] for made in calls.values() if -call <= len(made)]


def _fits(wanted: Address, parsed: Address) -> bool:
    path = ".".join(parsed.names or ())
    if not re.fullmatch(path_regex(wanted.path), path) or len(wanted.inner) != len(parsed.inner):
        return False
    made = parsed.call if isinstance(parsed.call, int) else 0
    if isinstance(wanted.call, CallRange) and made not in wanted.call:
        return False
    if isinstance(wanted.call, int) and wanted.call >= 0 and made != wanted.call:
        return False
    if not _meaning_fits(wanted, parsed):
        return False
    return all(_inner_fits(*pair) for pair in zip(wanted.inner, parsed.inner, strict=True))


def _meaning_fits(wanted: Address, found: Address) -> bool:
    if wanted.meaning is None or found.meaning is None:
        return wanted.meaning is found.meaning
    same = re.fullmatch(name_regex(wanted.meaning), found.meaning.literal or "") is not None
    return same and wanted.head in (None, found.head)


def _inner_fits(wanted: Inner, found: Inner) -> bool:
    if wanted.name.literal is None:
        return re.fullmatch(name_regex(wanted.name), found.name.literal or "") is not None
    return str(wanted) == str(found) or (wanted.place is None and str(wanted) == str(found).partition("[")[0])
