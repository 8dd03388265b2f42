"""Figures of circuits: the graph in layers, and the curve over the number of edges."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tenterhook._text import printable
from tenterhook.recipes._figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

__all__ = ["curve_figure", "graph_figure"]

PART = re.compile(r"(.*)\.[qkv]\Z")


def node_of(receiver: str) -> str:
    """Return the node of a receiver: ``attn3.1`` for ``attn3.1.q``."""
    found = PART.match(receiver)
    return found[1] if found else receiver


def levels(senders: Sequence[str], receivers: Sequence[str]) -> dict[str, int]:
    """Return the height of each node: heads of one layer are beside each other."""
    found: dict[str, int] = {}
    heights: dict[str, int] = {}
    for name in (*senders, *map(node_of, receivers)):
        layer = name.partition(".")[0]
        found[name] = heights.setdefault(layer, len(heights))
    return found


def graph_figure(
    senders: Sequence[str], receivers: Sequence[str], edges: Sequence[tuple[str, str]], weights: Sequence[float], *,
    title: str,
) -> Figure:  # fmt: skip
    """Return a figure of a graph: nodes in layers, edges in red if they raise the metric, in blue if they lower it."""
    heights = levels(senders, receivers)
    used = dict.fromkeys(node for one, other in edges for node in (one, node_of(other)))
    rows: dict[int, list[str]] = defaultdict(list)
    for node in sorted(used, key=lambda name: (heights[name], name)):
        rows[heights[node]].append(node)
    places = {
        node: ((place + 1) / (len(row) + 1), number)
        for number, (_, row) in enumerate(sorted(rows.items())) for place, node in enumerate(row)
    }  # fmt: skip
    figure = new_figure(max(5.0, 1.1 * max(map(len, rows.values()), default=1)), max(2.5, 0.75 * len(rows)))
    axes: Any = figure.add_subplot()
    far = max((abs(weight) for weight in weights), default=1.0) or 1.0
    for (one, other), weight in zip(edges, weights, strict=True):
        (x0, y0), (x1, y1) = places[one], places[node_of(other)]
        style: dict[str, Any] = {
            "arrowstyle": "-|>",
            "color": "#b2182b" if weight >= 0 else "#2166ac",
            "shrinkA": 9,
            "shrinkB": 9,
        }
        strength = abs(weight) / far
        style |= {"lw": 0.4 + 2.2 * strength, "alpha": 0.25 + 0.75 * strength}
        # An edge that passes other layers is bent around their nodes.
        style["connectionstyle"] = f"arc3,rad={0.0 if y1 - y0 == 1 else 0.3 if x0 <= x1 else -0.3}"
        axes.annotate("", (x1, y1), (x0, y0), arrowprops=style)
    for node, (x, y) in places.items():
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "0.4", "linewidth": 0.7}
        axes.text(x, y, printable(node), ha="center", va="center", fontsize=7, bbox=box, parse_math=False)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.6, max(len(rows) - 0.4, 0.6))
    axes.set_axis_off()
    axes.set_title(printable(title), fontsize=9, parse_math=False)
    return figure


def curve_figure(ks: Sequence[int], found: Tensor, others: Tensor, *, title: str) -> Figure:
    """Return a figure of a curve, with that of random circuits beside it."""
    figure = new_figure(4.6, 3.0)
    axes: Any = figure.add_subplot()
    axes.plot(ks, found.tolist(), marker="o", ms=3, label="circuit")
    if others.numel():
        axes.plot(ks, others.mean(1).tolist(), marker="o", ms=3, color="0.6", label="random")
        axes.fill_between(ks, others.amin(1).tolist(), others.amax(1).tolist(), color="0.85")
    axes.axhline(1, color="0.8", lw=0.8)
    axes.set_xlabel("edges", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.set_title(printable(title), fontsize=9, parse_math=False)
    axes.legend(fontsize=7, frameon=False)
    return figure
