"""Engines that ``attach`` refuses: those without the extension, and those whose rows have no known request or token."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tenterhook.errors import SessionError
from tenterhook.integrations.vllm.worker import Worker

__all__ = ["refuse_engine"]

NO_EXTENSION = (
    "the workers of this engine have no tenterhook in them. Start the engine with "
    'LLM(..., worker_extension_cls="tenterhook.integrations.vllm.Worker", enforce_eager=True).'
)
UNSUPPORTED = "this engine cannot be recorded or edited: {why}."
PARALLEL = "it uses pipeline, data or context parallelism. Use tensor parallelism only"
MICROBATCHES = "it computes each batch in parts at the same time. Start it with enable_dbo=False and ubatch_size=0"
LAST_TOKENS = "its last layers compute some tokens only. Start it with kv_sharing_fast_prefill=False"
DRAFTS = (
    "with speculative decoding and asynchronous scheduling, its workers do not know which token a row belongs to. "
    "Start it with async_scheduling=False"
)
POOLING = 'it generates no tokens, and only requests that generate are supported. Start it with runner="generate"'


def refuse_engine(config: Any) -> None:
    """Raise SessionError if an engine with this configuration cannot be recorded and edited."""
    parallel, cache = config.parallel_config, config.cache_config
    if not _has_extension(parallel.worker_extension_cls):
        raise SessionError(NO_EXTENSION)
    sizes = (
        parallel.pipeline_parallel_size,
        parallel.data_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )
    drafts = config.speculative_config is not None and bool(config.scheduler_config.async_scheduling)
    reasons = {
        PARALLEL: max(sizes) > 1,
        MICROBATCHES: parallel.use_ubatching,
        LAST_TOKENS: cache.kv_sharing_fast_prefill,
        DRAFTS: drafts,
        POOLING: config.model_config.runner_type != "generate",
    }
    found = [why for why, is_so in reasons.items() if is_so]
    if found:
        raise SessionError(UNSUPPORTED.format(why="; ".join(found)))


def _has_extension(name: str) -> bool:
    """Return whether the class that an engine adds to its workers is ours, or is derived from ours."""
    module, _, kind = name.rpartition(".")
    if not module:
        return False
    try:
        found = getattr(import_module(module), kind)
    except (ImportError, AttributeError):
        return False
    return isinstance(found, type) and issubclass(found, Worker)
