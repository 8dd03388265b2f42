"""Messages between an engine's caller and its workers: plain data, and tensors as bytes of safetensors.

Nothing is pickled. A worker never raises: an error would end some engines. It answers with the error, and the caller
raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tenterhook import errors

__all__ = ["answer", "answered", "pack", "unpack"]

BUILTIN = {"TypeError": TypeError, "ValueError": ValueError, "LookupError": LookupError}


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as bytes."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def unpack(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of :func:`pack`."""
    from safetensors.torch import load

    return load(data)


def answer(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Return the result of a call, or its error, as plain data."""
    try:
        return {"value": function(*args)}
    except Exception as error:  # noqa: BLE001  # The caller raises it.
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return {"error": type(error).__name__, "text": text}


def answered(answers: list[dict[str, Any]]) -> list[Any]:
    """Return the results of all workers, or raise the first error."""
    for each in answers:
        if "error" in each:
            name, text = each["error"], each["text"]
            kind = getattr(errors, name, None) if name in errors.__all__ else BUILTIN.get(name)
            raise (kind or errors.SessionError)(text if kind else f"{name} in a worker: {text}")
    return [each["value"] for each in answers]
