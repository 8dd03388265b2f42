"""The rows of each request in the batch that a model runner computes now.

vLLM has two model runners. Each keeps the batch in its own way, so each has an implementation of :class:`StepRows`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = ["RequestRows", "StepRows", "rows_of"]


class RequestRows(NamedTuple):
    """The rows ``start:stop`` of a batch belong to a request, and the first of them is its token ``position``."""

    request: str
    start: int
    stop: int
    position: int


class StepRows(Protocol):
    """The mapping from rows to requests, for one kind of model runner."""

    def now(self) -> list[RequestRows]:
        """Return the rows of all requests of the current step, in the order of the rows."""

    def close(self) -> None:
        """Remove what was installed in the runner."""


class FirstRunner:
    """The mapping of ``vllm.v1.worker.gpu_model_runner``, which keeps one batch over all steps."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def now(self) -> list[RequestRows]:
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        computed = batch.num_computed_tokens_cpu
        return [
            RequestRows(batch.req_ids[index], int(starts[index]), int(starts[index + 1]), int(computed[index]))
            for index in range(batch.num_reqs)
        ]

    def close(self) -> None:
        pass


class SecondRunner:
    """The mapping of ``vllm.v1.worker.gpu.model_runner``, which makes a new batch for each step."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._batch = runner, None
        make = runner.prepare_inputs

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            self._batch = make(*args, **kwargs)
            return self._batch

        runner.prepare_inputs = prepare_inputs

    def now(self) -> list[RequestRows]:
        batch: Any = self._batch
        starts, computed = batch.query_start_loc_np, batch.num_computed_tokens_np
        return [
            RequestRows(batch.req_ids[index], int(starts[index]), int(starts[index + 1]), int(computed[index]))
            for index in range(batch.num_reqs)
        ]

    def close(self) -> None:
        del self._runner.prepare_inputs


def rows_of(runner: Any) -> StepRows:
    """Return the mapping for a model runner."""
    return FirstRunner(runner) if hasattr(runner, "input_batch") else SecondRunner(runner)
