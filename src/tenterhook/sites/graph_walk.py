"""Walks through an autograd graph, from later operations to earlier ones."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from tenterhook.pytorch.autograd import operation_number

__all__ = ["Edge", "operations", "senders"]

Edge = tuple[Any, int]
"""a graph node, and which of its outputs"""


def operations(
    starts: Iterable[Any], *, since: int = 0, ends: Container[Edge] = (), seen: set[Any] | None = None
) -> Iterator[Any]:
    """Yield each operation between ``starts`` and the edges ``ends`` once.

    Operations with a number below ``since`` are left out, with all that is behind them, and so are those in ``seen``,
    to which the operations found are added.
    """
    todo, seen = list(starts), set() if seen is None else seen
    while todo:
        node = todo.pop()
        if node is None or node in seen or (since and operation_number(node) < since):
            continue
        seen.add(node)
        yield node
        for edge in node.next_functions:
            if edge not in ends:
                todo.append(edge[0])  # noqa: PERF401 - a comprehension costs a call for each operation


def senders(
    starts: Iterable[Any], ends: Container[Edge], *, since: int, seen: set[Any] | None = None
) -> list[tuple[Any, int, Edge]]:
    """Return the operations that send a gradient to one of the edges, each with the gradient's index and the edge."""
    walk = operations(starts, since=since, ends=ends, seen=seen)
    return [(node, index, edge) for node in walk for index, edge in enumerate(node.next_functions) if edge in ends]
