"""Page of a cost: treemaps of saved memory and FLOPs, memory in use operation by operation, and all the numbers."""

from __future__ import annotations

from dataclasses import asdict

from tenterhook._draw import short_number
from tenterhook.cost.cost_table import in_words, saved_table, short_bytes, short_seconds
from tenterhook.cost.result import Cost, ModuleCost
from tenterhook.report.page import Chart, Page
from tenterhook.report.treemap import TreemapPart, lay_out_parts

__all__ = ["cost_page"]

POINTS = 2000  # of a chart
SAVED = 40  # Rows of the table of lines that save memory.


def cost_page(cost: Cost, *, title: str | None = None) -> Page:
    """Return the page of a cost, before it is written."""
    facts = {"model": cost.model, "device": cost.device, "parameters": short_number(cost.parameters)}
    totals = cost.totals
    facts["FLOPs"] = short_number(totals.flops)
    if totals.backward_flops is not None:
        facts |= {"backward": short_number(totals.backward_flops), "saved": short_bytes(totals.saved_bytes or 0)}
    facts["peak"] = short_bytes(totals.peak_bytes or 0)
    if totals.seconds is not None:
        facts["time"] = short_seconds(totals.seconds + (totals.backward_seconds or 0.0))
    maps = [("FLOPs of the forward", _tree(cost, "flops"))]
    if totals.saved_bytes is not None:
        maps.insert(0, ("memory saved for backward", _tree(cost, "saved_bytes")))
    return Page(
        title or f"Cost of {cost.model}",
        facts,
        charts=[_memory(cost)],
        tables=[cost.table(), saved_table(cost, SAVED)],
        remarks=[{"text": text} for text in (*map(str, cost.advice), *cost.notes)],
        treemaps=[
            {"title": name, "boxes": [asdict(box) for box in lay_out_parts(root)]} for name, root in maps if root.size
        ],
    )


def _memory(cost: Cost) -> Chart:
    moments = cost.timeline
    step = max(1, len(moments) // POINTS)
    # Of each group of moments the one with the most memory, so that the peak is in the chart.
    kept = [max(range(place, min(place + step, len(moments))), key=lambda each: moments[each].bytes)
            for place in range(0, len(moments), step)]  # fmt: skip
    series = {
        "in use": [moments[each].bytes for each in kept],
        "saved for backward": [moments[each].saved for each in kept],
    }
    turn = next((place for place, each in enumerate(moments) if each.phase != "forward"), None)
    label = "operation" if turn is None else f"operation; the backward begins at {turn}"
    return Chart("memory, in bytes", kept, series, x_label=label)


def _tree(cost: Cost, column: str) -> TreemapPart:
    """Return the parts of the model with their sizes."""
    parts: list[TreemapPart] = []
    for each in cost.modules:
        size = float(getattr(each, column) or 0)
        part = TreemapPart(each.address.rpartition(".")[2] or cost.model, size, in_words(each))
        parts = parts[: each.depth]
        if parts:
            parts[-1].parts.append(part)
            if not size and not each.calls:
                part.size = _below(cost, each, column)
        parts.append(part)
        root = parts[0]
    return root


def _below(cost: Cost, module: ModuleCost, column: str) -> float:
    """Return the size of a container that is never called, such as a ModuleList: that of its children."""
    inside = [each for each in cost.modules if each.address.startswith(f"{module.address}.")]
    nearest = [each for each in inside if each.depth == module.depth + 1]
    return float(sum(getattr(each, column) or 0 for each in nearest))
