"""The part that vLLM adds to its workers: ``worker_extension_cls="tenterhook.integrations.vllm.Worker"``."""

from __future__ import annotations

from typing import Any

from tenterhook.integrations.vllm.messages import answer
from tenterhook.integrations.vllm.worker_state import WorkerState

__all__ = ["Worker"]

VERBS = ("check_edits", "described", "end", "points_of", "record", "take", "usable")


class Worker:
    """An extension of vLLM's worker. ``attach`` calls it; nothing happens in a worker before."""

    tenterhook_state: WorkerState | None = None

    def tenterhook(self, verb: str, *args: Any) -> dict[str, Any]:
        """Do one thing for the engine, and return its result or its error as plain data."""
        return answer(self._tenterhook, verb, *args)

    def _tenterhook(self, verb: str, *args: Any) -> Any:
        state = self.tenterhook_state
        if verb == "detach":
            if state is not None:
                state.close(*args)
            return None
        if state is None:
            state = self.tenterhook_state = WorkerState(self)
        state.is_attached = True
        if verb == "attach":
            return {"workers": state.workers, "model": type(state.model).__name__}
        if verb not in VERBS:
            raise ValueError(f"{verb!r} is not a verb of this worker")
        return getattr(state, verb)(*args)
