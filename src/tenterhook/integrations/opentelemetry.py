"""OpenTelemetry: a sink for ``th.watch`` that records each watched step as metrics."""

from __future__ import annotations

import math
from typing import Any

from tenterhook.watch.sink import SCALARS

__all__ = ["OpenTelemetrySink"]

MISSING = 'OpenTelemetrySink needs the package opentelemetry-api: pip install "tenterhook[opentelemetry]"'


class OpenTelemetrySink:
    """A sink that records OpenTelemetry metrics: ``th.watch(..., sinks=[OpenTelemetrySink()])``.

    There is one gauge for each statistic, such as ``tenterhook.norm``, with the attributes ``kind`` and ``address``.
    The gauge ``tenterhook.step`` is the step, and the counter ``tenterhook.findings`` has the attribute ``kind``. The
    meter provider decides where the metrics go.

    Args:
        meter: the meter; by default that of the global provider.
        scalars: the statistics to write.
        attributes: attributes of every metric, such as the name of the run.

    Raises:
        ImportError: the package opentelemetry-api is not installed.
    """

    def __init__(
        self, meter: Any = None, *, scalars: tuple[str, ...] = SCALARS, attributes: dict[str, Any] | None = None
    ) -> None:
        if meter is None:
            try:
                from opentelemetry import metrics
            except ImportError as error:
                raise ImportError(MISSING) from error
            meter = metrics.get_meter("tenterhook")
        self._attributes = attributes or {}
        self._gauges = {name: meter.create_gauge(f"tenterhook.{name}") for name in scalars}
        self._step = meter.create_gauge("tenterhook.step")
        self._findings = meter.create_counter("tenterhook.findings")

    def __repr__(self) -> str:
        return f"OpenTelemetrySink({', '.join(self._gauges)})"

    def write(self, page: Any, findings: list[Any], _history: Any) -> None:
        """Record a step."""
        self._step.set(page.step, self._attributes)
        for kind, address, numbers in page.lines():
            attributes = {**self._attributes, "kind": kind, "address": address}
            for name, gauge in self._gauges.items():
                if math.isfinite(numbers[name]):
                    gauge.set(numbers[name], attributes)
        for group in findings:
            self._findings.add(len(group.details), {**self._attributes, "kind": group.kind})

    def close(self) -> None:
        """Leave the provider running: it belongs to the user."""
