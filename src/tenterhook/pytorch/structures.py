"""Classes that are registered as pytree nodes, such as the outputs of Hugging Face models."""

from __future__ import annotations

from typing import Any

from tenterhook.pytorch.names import attribute, find
from tenterhook.pytorch.support import check, feature

__all__ = [
    "registered",
]

_REGISTERED: Any = find("torch.utils._pytree.SUPPORTED_NODES", {})
attribute("pytree node", "flatten_fn")
attribute("pytree node", "unflatten_fn")


def registered(kind: type) -> Any:
    """Return the pytree node of a class, with ``flatten_fn`` and ``unflatten_fn``, or None."""
    return _REGISTERED.get(kind)


@feature("structured values", used_by="every session", still_works="nothing that opens a session")
def probe_structures() -> str | None:
    """Check that a registered class can be flattened and unflattened."""
    node = registered(dict)
    check(node is not None, "the registered pytree classes cannot be listed")
    parts, context = node.flatten_fn({"a": 1, "b": 2})
    check(
        list(parts) == [1, 2] and node.unflatten_fn(parts, context) == {"a": 1, "b": 2},
        "a registered class cannot be flattened and unflattened",
    )
    return None
