"""The verbs inside vLLM: record and edit values of the requests that an engine serves.

A request's values have one row for each of its tokens, in order, however vLLM schedules and batches them. A request's
edits change its own rows only.

``attach`` takes an ``LLM`` or an ``AsyncLLM`` whose workers were started with
``worker_extension_cls="tenterhook.integrations.vllm.Worker"``.
"""

from tenterhook.integrations.vllm.attach import AsyncEngine, Engine, attach
from tenterhook.integrations.vllm.request_tape import EngineTape, RequestTape
from tenterhook.integrations.vllm.worker import Worker

__all__ = ["AsyncEngine", "Engine", "EngineTape", "RequestTape", "Worker", "attach"]
