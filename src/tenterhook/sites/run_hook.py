"""The call of a backward hook, the check of its result, and its error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tenterhook._text import counted
from tenterhook.errors import HookError

__all__ = [
    "LATE",
    "LEAF",
    "NOWHERE",
    "NO_INPUT",
    "ORDER",
    "OVERLAP",
    "Gradients",
    "Hook",
    "as_tuple",
    "checked",
    "name_of",
    "run_hook",
]

Gradients = tuple[Tensor | None, ...]
Hook = Callable[..., Any]

OVERLAP = (
    "outputs of {module} share memory with one another and were changed in place after it returned, so a backward "
    "hook cannot separate their gradients. Return copies: .clone()"
)
LATE = (
    "the backward hook {hook} of {module} returned another gradient, but a tensor that shares memory with an input or "
    "output of {module} was changed in place after the call, so autograd used the gradients before all of them were "
    "known. Return copies from the module (.clone()), or do not change gradients in the hook."
)
NO_INPUT = (
    "the backward hook {hook} of {module} returned a gradient, but no input of that call requires one. "
    "Return None, or make an input require a gradient: x.requires_grad_()"
)
NOWHERE = (
    "the backward hook {hook} of {module} returned a gradient at index {place} of {what}, which has no gradient in "
    "this backward pass. Return None there."
)
LEAF = (
    "{module} changed an input in place under no_grad. The input is a leaf tensor, so the backward hooks cannot get "
    "its gradient. Pass a copy: x.clone()"
)
ORDER = (
    "a forward pre-hook of {module} was registered after its backward hook, and replaced some of the inputs, so their "
    "gradients cannot be separated in this call. It works from the next call on. Or register the pre-hook with "
    "tenterhook.hooks.register_forward_pre_hook, or before the backward hook."
)


def run_hook(hook: Hook, module: nn.Module, *gradients: Gradients) -> Any:
    """Call a hook. An error gets a note that names the hook, because autograd's traceback does not."""
    try:
        return hook(module, *gradients)
    except Exception as error:
        error.add_note(f"in the backward hook {name_of(hook)} of a {type(module).__name__}")
        raise


def as_tuple(new: Any) -> Gradients:
    """Return the result of a hook as a tuple."""
    return new if isinstance(new, tuple) else (new,)


def checked(new: Any, length: int, what: str, hook: Hook) -> Gradients:
    """Return the result of a hook as a tuple, or raise :class:`HookError` if its length is wrong."""
    gradients = as_tuple(new)
    if len(gradients) != length:
        text = f"the backward hook {name_of(hook)} returned {counted(len(gradients), 'gradient')} for {what}"
        raise HookError(f"{text}, which has {length}")
    return gradients


def name_of(hook: Hook) -> str:
    """Return the name of a hook for an error message."""
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)
