"""``declare``: the options of an engine that runs compiled code, with the points that it can record and edit."""

from __future__ import annotations

from typing import Any

from tenterhook._version import __version__
from tenterhook.address.grammar import parse
from tenterhook.errors import SessionError
from tenterhook.integrations.vllm.worker_state import KEY

__all__ = ["declare"]


def declare(*points: str) -> dict[str, Any]:
    """Return options for ``LLM(...)`` that make points available in compiled code: ``LLM(model, **declare(points))``.

    vLLM compiles a model once, when it starts, and ignores what is added later. So the points are part of the code that
    it compiles, and of the key under which it keeps that code.

    >>> from tenterhook.integrations.vllm import declare
    >>> sorted(declare("model.layers.*@resid"))
    ['additional_config', 'compilation_config', 'worker_cls', 'worker_extension_cls']

    Args:
        *points: addresses and globs of outputs, such as ``"model.layers.*@resid"`` or ``"model.layers.3@mlp_out"``.

    Raises:
        AddressError: a text is not an address.
        SessionError: no points were given.
    """
    if not points:
        raise SessionError('name the points to declare: declare("model.layers.*@resid")')
    for point in points:
        parse(point)
    return {
        "worker_cls": "tenterhook.integrations.vllm.CompiledWorker",
        "worker_extension_cls": "tenterhook.integrations.vllm.Worker",
        "additional_config": {KEY: {"points": list(points), "version": __version__}},
        # The graphs of CUDA are recorded in pieces between the points, because a point runs Python code in each step.
        "compilation_config": {"cudagraph_mode": "PIECEWISE"},
    }
