"""A sink that writes TensorBoard's event files."""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
from typing import Any

from tenterhook.watch.sink import SCALARS

__all__ = ["TensorBoard"]

MISSING = 'th.TensorBoard needs the package tensorboard: pip install "tenterhook[tensorboard]"'
_files = itertools.count()


class TensorBoard:
    """A sink that writes each watched step for TensorBoard: ``th.watch(..., sinks=[th.TensorBoard(folder)])``.

    Scalars are named ``kind/address/statistic``. Histograms are named ``kind/address`` and cover all steps so far.

    Args:
        folder: the folder for the event files.
        scalars: the statistics to write.
        histograms: write histograms at every n-th watched step; 0 writes none.

    Raises:
        ImportError: the package tensorboard is not installed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, scalars: tuple[str, ...] = SCALARS, histograms: int = 10
    ) -> None:
        try:
            from torch.utils.tensorboard import summary
        except ImportError as error:
            raise ImportError(MISSING) from error
        self.folder, self._summary = os.fspath(folder), summary
        self._scalars, self._every, self._count = scalars, histograms, 0
        self._file: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard({self.folder!r})"

    def write(self, page: Any, findings: list[Any], history: Any) -> None:
        """Write a step."""
        made = [
            self._summary.scalar(f"{kind}/{address}/{name}", numbers[name])
            for kind, address, numbers in page.lines()
            for name in self._scalars
        ]
        made += [self._summary.text("findings", str(finding)) for finding in findings]
        if self._every and self._count % self._every == 0:
            made += self._histograms(history)
        self._count += 1
        self._put(page.step, page.time, made)

    def _histograms(self, history: Any) -> list[Any]:
        found = []
        for row in history.rows():
            counts, edges = row["histogram"]["counts"], row["histogram"]["edges"]
            if not counts or not math.isfinite(row["norm"]):
                continue
            total, number = row["mean"] * sum(counts), sum(counts)
            squares = (row["std"] ** 2 + row["mean"] ** 2) * number
            name = f"{row['kind']}/{row['address']}"
            found.append(
                self._summary.histogram_raw(name, edges[0], edges[-1], number, total, squares, edges[1:], counts)
            )
        return found

    def _put(self, step: int, when: float, summaries: list[Any]) -> None:
        """Write a step as one event in this thread, so that an error is raised at once."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._file is None:
            self._file = _open(self.folder)
            self._file.write(Event(wall_time=when, file_version="brain.Event:2").SerializeToString())
        every = Summary(value=[value for summary in summaries for value in summary.value])
        self._file.write(Event(wall_time=when, step=step, summary=every).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def _open(folder: str) -> Any:
    from tensorboard.compat import tf
    from tensorboard.summary.writer.record_writer import RecordWriter

    tf.io.gfile.makedirs(folder)
    name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
    return RecordWriter(tf.io.gfile.GFile(os.path.join(folder, name), "wb"))  # noqa: PTH118 - it may be a URL
