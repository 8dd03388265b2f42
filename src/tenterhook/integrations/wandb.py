"""Weights & Biases: a sink for ``th.watch`` that writes each watched step to a run."""

from __future__ import annotations

from typing import Any

from tenterhook.watch.sink import SCALARS, scalars

__all__ = ["WandbSink"]

MISSING = 'WandbSink needs the package wandb: pip install "tenterhook[wandb]"'
STEP = "tenterhook/step"


class WandbSink:
    """A sink that logs to a run of Weights & Biases: ``th.watch(..., sinks=[WandbSink()])``.

    Metrics are named ``tenterhook/kind/address/statistic``, over their own axis ``tenterhook/step``, so they do not
    disturb the steps of other logs. Findings are alerts of the run.

    Args:
        run: the run; by default the current one, ``wandb.run``.
        scalars: the statistics to write.
        alerts: send findings as alerts.

    Raises:
        ImportError: the package wandb is not installed.
        RuntimeError: there is no run; call ``wandb.init`` first.
    """

    def __init__(self, run: Any = None, *, scalars: tuple[str, ...] = SCALARS, alerts: bool = True) -> None:
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise ImportError(MISSING) from error
            run = wandb.run
        if run is None:
            raise RuntimeError("there is no run of Weights & Biases; call wandb.init() first, or give one: run=")
        self._run, self._scalars, self._alerts = run, scalars, alerts
        self._run.define_metric("tenterhook/*", step_metric=STEP)

    def __repr__(self) -> str:
        return f"WandbSink({getattr(self._run, 'name', None)!r})"

    def write(self, page: Any, findings: list[Any], _history: Any) -> None:
        """Log a step."""
        found = {f"tenterhook/{name}": number for name, number in scalars(page, self._scalars).items()}
        self._run.log({STEP: page.step, **found})
        for group in findings if self._alerts else ():
            self._run.alert(title=group.title, text=f"{group}\n{group.advice()}".strip())

    def close(self) -> None:
        """Leave the run open: it belongs to the user."""
