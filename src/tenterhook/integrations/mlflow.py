"""MLflow: a sink for ``th.watch`` that writes each watched step to a run."""

from __future__ import annotations

import re
from typing import Any

from tenterhook.watch.sink import SCALARS, scalars

__all__ = ["MLflowSink"]

MISSING = 'MLflowSink needs the package mlflow: pip install "tenterhook[mlflow]"'
BATCH = 1000  # The most metrics that a server takes at once.
REFUSED = re.compile(r"[^\w\-. :/]")  # Characters that MLflow does not allow in names.


class MLflowSink:
    """A sink that logs to a run of MLflow: ``th.watch(..., sinks=[MLflowSink()])``.

    Metrics are named ``kind/address/statistic``; characters that MLflow refuses are replaced by ``_``. Findings are
    lines of the artifact ``tenterhook-findings.txt``.

    Args:
        run_id: the run; by default the active one, which is started if there is none.
        scalars: the statistics to write.
        client: an ``mlflow.MlflowClient`` to use.

    Raises:
        ImportError: the package mlflow is not installed.
    """

    def __init__(self, run_id: str | None = None, *, scalars: tuple[str, ...] = SCALARS, client: Any = None) -> None:
        try:
            import mlflow
            from mlflow.entities import Metric
        except ImportError as error:
            raise ImportError(MISSING) from error
        self._metric: Any = Metric
        self._client = mlflow.MlflowClient() if client is None else client
        self.run_id = run_id or (mlflow.active_run() or mlflow.start_run()).info.run_id
        self._scalars = scalars
        self._said: list[str] = []

    def __repr__(self) -> str:
        return f"MLflowSink({self.run_id!r})"

    def write(self, page: Any, findings: list[Any], _history: Any) -> None:
        """Log a step."""
        when = int(page.time * 1000)
        found = [
            self._metric(REFUSED.sub("_", name), number, when, page.step)
            for name, number in scalars(page, self._scalars).items()
        ]
        for begin in range(0, len(found), BATCH):
            self._client.log_batch(self.run_id, metrics=found[begin : begin + BATCH])
        if findings:
            self._said += [f"step {page.step}: {group}\n  {group.advice()}" for group in findings]
            self._client.log_text(self.run_id, "\n".join(self._said) + "\n", "tenterhook-findings.txt")

    def close(self) -> None:
        """Leave the run open: it belongs to the user."""
