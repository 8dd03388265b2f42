"""The verbs inside vLLM: record and edit values of the requests that an engine serves.

A request's values have one row for each of its tokens, in order, however vLLM schedules and batches them. A request's
edits change its own rows only.

``attach`` takes an ``LLM`` or an ``AsyncLLM`` whose workers were started with
``worker_extension_cls="tenterhook.integrations.vllm.Worker"``. ``declare`` returns the options for an engine that runs
compiled code.
"""

from typing import TYPE_CHECKING, Any

from tenterhook.integrations.vllm.attach import AsyncEngine, Engine, attach
from tenterhook.integrations.vllm.declare import declare
from tenterhook.integrations.vllm.request_tape import EngineTape, RequestTape
from tenterhook.integrations.vllm.saved_edits import SavedEdits
from tenterhook.integrations.vllm.worker import Worker

if TYPE_CHECKING:
    from tenterhook.integrations.vllm.compiled_worker import CompiledWorker

__all__ = [
    "AsyncEngine",
    "CompiledWorker",
    "Engine",
    "EngineTape",
    "RequestTape",
    "SavedEdits",
    "Worker",
    "attach",
    "declare",
]


def __getattr__(name: str) -> Any:
    """Load the worker on use: it needs vLLM, and is only named in the options of an engine."""
    if name == "CompiledWorker":
        from tenterhook.integrations.vllm.compiled_worker import CompiledWorker

        return CompiledWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
