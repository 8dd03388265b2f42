"""The result of a sweep: one value for each case, with labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenterhook._draw import Column, Drawn, Row, Table
from tenterhook._text import counted
from tenterhook.errors import SweepError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tenterhook.replay.call_server import ServedCall
    from tenterhook.replay.cases import Case

__all__ = ["Sweep"]

SHOWN = 40


class Sweep(Drawn):
    """The results of a sweep. ``.values`` has one row for each case, in the given order.

    ``.base`` is the metric of the unedited run. ``.failed`` has the errors of failed cases by index; their rows are
    NaN. ``.how`` describes how the cases were run.
    """

    def __init__(self, cases: list[Case], axes: Mapping[str, tuple[Any, ...]], served: ServedCall) -> None:
        self.cases, self.axes, self.served = cases, dict(axes), served
        self.base: Tensor | None = None
        self.failed: dict[int, Exception] = {}
        self.how: list[str] = []
        self._found: dict[int, Tensor] = {}
        self._runner: Any = None

    # -- values
    # ---------------------------------------------------------------------------------------------------------

    @property
    def values(self) -> Tensor:
        """One row for each case. It is NaN if the case failed or has not run."""
        if not self._found:
            raise SweepError("no case of this sweep has a result so far")
        like = next(iter(self._found.values()))
        if len(self._found) < len(self.cases) and not like.is_floating_point():
            like = like.double()
        missing = torch.full_like(like, float("nan")) if len(self._found) < len(self.cases) else like
        return torch.stack([self._found.get(index, missing).to(like) for index in range(len(self.cases))])

    @property
    def grid(self) -> Tensor:
        """The values with one dimension for each axis of the grid."""
        if not self.axes:
            raise SweepError("the cases of this sweep were given as a list; th.grid(...) gives them axes")
        values = self.values
        return values.reshape(*[len(axis) for axis in self.axes.values()], *values.shape[1:])

    @property
    def done(self) -> bool:
        """True if every case was run."""
        return len(self._found) + len(self.failed) == len(self.cases)

    def __len__(self) -> int:
        return len(self.cases)

    def resume(self) -> Sweep:
        """Run the cases that have no result: those that have not run, and those that failed. Return this object."""
        if self._runner is not None:
            self.failed.clear()
            self._runner.go()
        return self

    # -- conversion
    # -----------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict for each case: its labels, and its value as a number or a list."""
        values = self.values.cpu()
        named = [dict(case.labels) or {"case": str(case)} for case in self.cases]
        return [{**labels, "value": value.tolist()} for labels, value in zip(named, values, strict=True)]

    def to_pandas(self) -> Any:
        """Return a data frame with a column for each axis and one for the value."""
        try:
            import pandas as pd
        except ImportError as error:
            raise SweepError("a data frame needs pandas: pip install pandas") from error
        return pd.DataFrame(self.rows())

    def heatmap(self, *, title: str = "", center: float | None = None) -> Figure:
        """Return a matplotlib figure of a sweep over two axes with a single number as metric.

        Values below ``center`` are blue, values above are red. The default center is the unedited metric.
        """
        try:
            import matplotlib.figure  # noqa: F401

            from tenterhook._notebook_figure import NotebookFigure
        except ImportError as error:
            raise SweepError("a heat map needs matplotlib: pip install matplotlib") from error
        grid = self.grid.float().cpu()
        if grid.dim() != 2:  # noqa: PLR2004
            shape = list(grid.shape)
            raise SweepError(f"a heat map has two axes, and this sweep has the shape {shape}; choose a part of .grid")
        figure = NotebookFigure(figsize=(2 + 0.35 * grid.shape[1], 1.5 + 0.3 * grid.shape[0]), layout="constrained")
        axes = figure.add_subplot()
        middle = center if center is not None else float(self.base) if self.base is not None else 0.0
        far = max(float((grid[~grid.isnan()] - middle).abs().max()) if grid.numel() else 1.0, 1e-12)
        image = axes.imshow(grid.numpy(), cmap="RdBu_r", vmin=middle - far, vmax=middle + far, aspect="auto")
        (down, rows), (along, columns) = self.axes.items()
        axes.set_xticks(range(len(columns)), [str(value) for value in columns])
        axes.set_yticks(range(len(rows)), [str(value) for value in rows])
        axes.set(xlabel=along, ylabel=down, title=title)
        figure.colorbar(image)
        return figure

    def table(self) -> Table:
        """Return a table with one row for each case."""
        names = list(self.axes) or ["case"]
        ran = bool(self._found)
        values = self.values.cpu() if ran else None
        rows = []
        for index, case in enumerate(self.cases[:SHOWN]):
            cells = [str(case.labels[name]) if name in case.labels else str(case) for name in names]
            error = self.failed.get(index)
            shown = f"failed: {error!r:.60}" if error is not None else "" if values is None else _shown(values[index])
            rows.append(Row((*cells, shown), style="dim" if error is not None else ""))
        more = [f"… and {len(self.cases) - SHOWN} more"] if len(self.cases) > SHOWN else []
        base = f", unedited {_shown(self.base)}" if self.base is not None else ""
        title = f"sweep: {len(self._found)} of {counted(len(self.cases), 'case')}{base}"
        columns = (*[Column(name) for name in names], Column("value", right=True))
        return Table(title, columns, tuple(rows), (*more, *self.how))


def _shown(value: Tensor) -> str:
    return f"{float(value):.4g}" if value.numel() == 1 else f"{list(value.shape)}"
