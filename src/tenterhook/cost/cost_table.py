"""Tables that a cost prints as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tenterhook._draw import Column, Row, Table, counted, short_number

if TYPE_CHECKING:
    from tenterhook.cost.result import Cost, LineCost, ModuleCost

__all__ = ["in_words", "line_rows", "saved_table", "short_bytes", "short_seconds", "sorted_rows", "tree"]

COLUMNS = (
    Column("name", tree=True),
    Column("type", spare=True),
    Column("calls", right=True),
    Column("params", right=True),
    Column("FLOPs", right=True),
    Column("backward", right=True),
    Column("output", right=True, spare=True),
    Column("saved", right=True),
    Column("peak", right=True, spare=True),
    Column("time", right=True),
    Column("of peak speed", right=True),
    Column("share"),
)
BAR = 12
EIGHTHS = "▏▎▍▌▋▊▉█"
LINES = 5  # Lines that save memory, below the tree.
UNITS = ("B", "kB", "MB", "GB", "TB")
THOUSAND = 1000


def short_bytes(size: float) -> str:
    """Return a number of bytes in short form.

    >>> [short_bytes(size) for size in (0, 999, 4096, 3_100_000_000)]
    ['0 B', '999 B', '4.1 kB', '3.1 GB']
    """
    value, units = float(size), list(UNITS)
    while round(value, 1) >= THOUSAND and len(units) > 1:
        value /= THOUSAND
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def short_seconds(seconds: float) -> str:
    """Return a time in short form.

    >>> [short_seconds(seconds) for seconds in (2e-5, 0.0123, 1.5)]
    ['20 µs', '12.3 ms', '1.50 s']
    """
    if seconds < 1e-3:  # noqa: PLR2004 - a millisecond
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def tree(cost: Cost) -> Table:
    """Return the tree of modules. Equal siblings are one row, which shows the numbers of one of them."""
    rows = _folded(cost.modules)
    whole = _weight(cost.modules[0])
    drawn = tuple(_row(each, name, whole) for each, name in rows)
    return Table(f"{cost.model}: {_summary(cost)}", COLUMNS, drawn, tuple(_footer(cost)))


def sorted_rows(cost: Cost, column: str, modules: Sequence[ModuleCost]) -> Table:
    """Return a table of modules with full addresses."""
    whole = _weight(cost.modules[0])
    drawn = tuple(_row(replace(each, depth=0), each.address or ":return", whole) for each in modules)
    return Table(f"{cost.model} by {column}", COLUMNS, drawn)


def line_rows(cost: Cost, lines: Sequence[LineCost]) -> Table:
    """Return a table of lines of forwards."""
    columns = (Column("module"), Column("line"), Column("FLOPs", right=True), Column("backward", right=True))
    rows = tuple(
        Row((
            each.address or ":return",
            str(each.line),
            short_number(each.flops) if each.flops else "",
            short_number(each.backward_flops) if each.backward_flops else "",
            short_bytes(each.saved_bytes) if each.saved_bytes else "",
        ))
        for each in lines
    )  # fmt: skip
    return Table(f"{cost.model}, line by line", (*columns, Column("saved", right=True)), rows)


def saved_table(cost: Cost, most: int) -> Table:
    """Return a table of the lines that save memory for backward, the largest first."""
    columns = (Column("saved", right=True), Column("module"), Column("line"))
    sums: dict[tuple[str, str], int] = {}
    for each in cost.saved:
        key = each.address or ":return", str(each.line or "")
        sums[key] = sums.get(key, 0) + each.bytes
    found = sorted(sums.items(), key=lambda item: -item[1])
    rows = tuple(Row((short_bytes(size), *key)) for key, size in found[:most])
    footer = (f"… and {len(found) - most} more",) if len(found) > most else ()
    return Table("saved for backward, by line", columns, rows, footer)


def in_words(cost: ModuleCost) -> str:
    """Return the cost of one module as one line."""
    parts = [counted(cost.calls, "call"), f"{short_number(cost.parameters)} parameters"]
    parts.append(f"{short_number(cost.flops)} FLOPs")
    if cost.backward_flops is not None:
        parts.append(f"{short_number(cost.backward_flops)} FLOPs backward")
    if cost.saved_bytes is not None:
        parts.append(f"{short_bytes(cost.saved_bytes)} saved")
    if cost.seconds is not None:
        parts.append(short_seconds(cost.seconds + (cost.backward_seconds or 0)))
    return f"{cost.address or ':return'} ({cost.kind}): {', '.join(parts)}"


def _summary(cost: Cost) -> str:
    found = cost.known
    parts = [f"{short_number(cost.parameters)} parameters"]
    if found is None:
        return ", ".join([*parts, "not run"])
    parts.append(f"{short_number(found.flops)} FLOPs")
    if found.backward_flops is not None:
        parts.append(f"{short_number(found.backward_flops)} backward")
        parts.append(f"{short_bytes(found.saved_bytes or 0)} saved for backward")
    parts.append(f"peak {short_bytes(found.peak_bytes or 0)}")
    if found.seconds is not None:
        parts.append(f"{short_seconds(found.seconds + (found.backward_seconds or 0))}")
    return ", ".join([*parts, f"on {cost.device}"])


def _footer(cost: Cost) -> list[str]:
    lines = [
        f"{short_bytes(size)} saved by {line or 'a line that is not known'}"
        for line, size in cost.saved_lines()[:LINES]
    ]
    return [*lines, *map(str, cost.advice), *cost.notes, *_compiled(cost)]


def _compiled(cost: Cost) -> list[str]:
    found = cost.known.compiled if cost.known is not None else None
    if found is None:
        return []
    parts = [f"{short_bytes(found.saved_bytes)} saved for backward"] if found.saved_bytes is not None else []
    parts += [short_seconds(found.seconds + (found.backward_seconds or 0.0))] if found.seconds is not None else []
    return [f"Compiled: {', '.join(parts)}."] if parts else []


def _row(cost: ModuleCost, name: str, whole: float) -> Row:
    cells = (
        name,
        cost.kind,
        str(cost.calls) if cost.calls else "",
        short_number(cost.parameters) if cost.parameters else "",
        short_number(cost.flops) if cost.flops else "",
        short_number(cost.backward_flops) if cost.backward_flops else "",
        short_bytes(cost.activation_bytes) if cost.activation_bytes else "",
        short_bytes(cost.saved_bytes) if cost.saved_bytes else "",
        short_bytes(cost.peak_bytes) if cost.peak_bytes else "",
        short_seconds(cost.seconds + (cost.backward_seconds or 0)) if cost.seconds is not None else "",
        f"{cost.roofline:.0%}" if cost.roofline is not None else "",
        _bar(_weight(cost) / whole) if whole else "",
    )
    return Row(cells, cost.depth, "dim" if not cost.calls and not cost.parameters else "")


def _weight(cost: ModuleCost) -> float:
    """Return the size of a module's bar: its time if it was measured, else its FLOPs."""
    if cost.seconds is not None:
        return cost.seconds + (cost.backward_seconds or 0.0)
    return float(cost.flops + (cost.backward_flops or 0))


def _bar(share: float) -> str:
    """Return a bar for a share of the whole.

    >>> _bar(1.0), _bar(0.5), _bar(0.0)
    ('████████████', '██████', '')
    """
    eighths = round(min(share, 1.0) * BAR * 8)
    full, part = divmod(eighths, 8)
    return "█" * full + (EIGHTHS[part - 1] if part else "")


# -- equal siblings ---------------------------------------------------------------------------------------------------


def _folded(modules: Sequence[ModuleCost]) -> list[tuple[ModuleCost, str]]:
    """Return the rows of the tree with their names."""
    rows: list[tuple[ModuleCost, str]] = []
    place = 0
    while place < len(modules):
        first = _subtree(modules, place)
        like, end = [first], place + len(first)
        while end < len(modules) and modules[place].depth and modules[end].depth == modules[place].depth:
            other = _subtree(modules, end)
            if _shape(other) != _shape(first):
                break
            like.append(other)
            end += len(other)
        if len(like) == 1:
            rows.append((modules[place], _name(modules[place])))
            place += 1
            continue
        merged = [_merged([each[number] for each in like]) for number in range(len(first))]
        inner = [(merged[0], f"{_name(first[0])} … {_name(like[-1][0])}, each"), *_folded(merged[1:])]
        rows += inner
        place = end
    return rows


def _subtree(modules: Sequence[ModuleCost], place: int) -> Sequence[ModuleCost]:
    end = place + 1
    while end < len(modules) and modules[end].depth > modules[place].depth:
        end += 1
    return modules[place:end]


def _shape(modules: Sequence[ModuleCost]) -> list[Any]:
    top = modules[0].depth
    return [
        (each.depth - top, each.kind, each.calls, each.parameters, each.flops, each.backward_flops, each.saved_bytes)
        + (("",) if each is modules[0] else (_name(each),))
        for each in modules
    ]


def _merged(like: Sequence[ModuleCost]) -> ModuleCost:
    """Return a row for equal modules: the largest peak, and mean times."""
    first = like[0]
    if first.seconds is None:
        return replace(first, peak_bytes=max(each.peak_bytes for each in like))
    backward = None if first.backward_seconds is None else sum(each.backward_seconds or 0 for each in like) / len(like)
    rooflines = [each.roofline for each in like if each.roofline is not None]
    return replace(
        first,
        peak_bytes=max(each.peak_bytes for each in like),
        seconds=sum(each.seconds or 0 for each in like) / len(like),
        backward_seconds=backward,
        roofline=sum(rooflines) / len(rooflines) if rooflines else None,
    )


def _name(cost: ModuleCost) -> str:
    return cost.address.rpartition(".")[2] or ":return"
