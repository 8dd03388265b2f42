"""A sink that writes TensorBoard's event files."""

from __future__ import annotations

import math
import os
from typing import Any

__all__ = ["TensorBoard"]

MISSING = 'th.TensorBoard needs the package tensorboard: pip install "tenterhook[tensorboard]"'
SCALARS = ("mean", "std", "norm")


class TensorBoard:
    """Writes each watched step of ``th.watch(..., sinks=[th.TensorBoard(folder)])`` for TensorBoard.

    Scalars are named ``kind/address/statistic``; at every ``histograms``-th watched step each row's histogram over all
    steps so far is written too, as ``kind/address``.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, scalars: tuple[str, ...] = SCALARS, histograms: int = 10
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(MISSING) from error
        self._writer: Any = SummaryWriter(os.fspath(folder))
        self._scalars, self._every, self._count = scalars, histograms, 0

    def write(self, page: Any, findings: list[Any], books: Any) -> None:
        """Take a step."""
        for kind, address, numbers in page.lines():
            for name in self._scalars:
                self._writer.add_scalar(f"{kind}/{address}/{name}", numbers[name], page.step, walltime=page.time)
        for finding in findings:
            self._writer.add_text("findings", str(finding), page.step, walltime=page.time)
        if self._every and self._count % self._every == 0:
            self._histograms(page, books)
        self._count += 1
        self._writer.flush()

    def _histograms(self, page: Any, books: Any) -> None:
        for row in books.rows():
            counts, edges = row["histogram"]["counts"], row["histogram"]["edges"]
            if not counts or not math.isfinite(row["norm"]):
                continue
            total, number = row["mean"] * sum(counts), sum(counts)
            self._writer.add_histogram_raw(
                f"{row['kind']}/{row['address']}",
                min=edges[0],
                max=edges[-1],
                num=number,
                sum=total,
                sum_squares=(row["std"] ** 2 + row["mean"] ** 2) * number,
                bucket_limits=edges[1:],
                bucket_counts=counts,
                global_step=page.step,
            )

    def close(self) -> None:
        """End the files."""
        self._writer.close()
