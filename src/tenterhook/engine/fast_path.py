"""The fast path: the code that runs at most calls of a touched module.

``watched`` stores a module's output and watches its gradient. ``within`` runs a rewritten forward. Both leave a call to
:mod:`tenterhook.engine.dispatch` if anything is unusual: another thread, a recomputation, or a copy of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook.engine.dispatch import OWN_FILES, dispatch, leave
from tenterhook.engine.refuse_tracing import refuse_traced
from tenterhook.pytorch.autograd import current_backward_id, next_operation_number
from tenterhook.pytorch.checkpointing import may_be_checkpointed, saved_tensor_hooks
from tenterhook.pytorch.module_calls import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from tenterhook.engine.action import Direct
    from tenterhook.engine.install import ForwardPatch
    from tenterhook.engine.module_actions import ModuleActions

__all__ = ["lone_tensor", "watched", "within"]

Forward = Callable[..., Any]
Watch = Callable[..., Tensor | None]

OWN_FILES.add(__file__)

is_grad_enabled = torch.is_grad_enabled


def watched(patch: ForwardPatch, actions: ModuleActions, observer: Direct, watch: Watch) -> Forward:
    """Return a forward for a module with two observers, where the second one watches the tensor's gradient.

    If the first observer has no ``store``, the second one stores everything, and this forward stores nothing.
    """
    module, original, owner = patch.module, patch.original, actions.owner
    store, next_key, base, state = observer.store, actions.next_key, actions.base, patch.module.__dict__

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if (
            current.token != owner or current_backward_id() != -1 or self is not module
            or not is_grad_enabled() or saved_tensor_hooks() is not None  # A checkpoint may be active.
        ):  # fmt: skip
            return dispatch(patch, self, args, kwargs)
        key, since = next_key(), next_operation_number()
        value = original(*args, **kwargs) if kwargs else original(*args)
        tensor: Any = value if type(value) is Tensor else lone_tensor(value)
        if tensor is not None and tensor.requires_grad and not (state[FORWARD_HOOKS] or GLOBAL_FORWARD_HOOKS):
            kept = (tensor.detach(), tensor._version) if store is not None else None
            own = watch(tensor, key - base, since, kept, value, args, kwargs)
            if own is not None:
                if kept is not None and store is not None:
                    store(key, kept if tensor is value else (*kept, len(value) - 1))
                if own is tensor:
                    return value
                return own if tensor is value else (own, *value[1:])
        refuse_traced(module)
        for enter in actions.enters:
            enter(key - base, since, args, kwargs)
        return leave(patch, [(actions, key - base)], value)

    return forward


def lone_tensor(value: Any) -> Tensor | None:
    """Return the tensor of a tuple whose other items are all None, such as attention's output without weights."""
    if type(value) is not tuple or not value or type(value[0]) is not Tensor:
        return None
    return value[0] if all(part is None for part in value[1:]) else None


def within(patch: ForwardPatch, actions: ModuleActions, body: Forward) -> Forward:
    """Return a forward for actions that are all inside the forward; ``body`` is the rewritten forward."""
    module, owner, next_key, again = patch.module, actions.owner, actions.next_key, actions.again
    observes = all(binding.action.observes for binding in actions.inner)

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if (
            current.token != owner or current_backward_id() != -1 or self is not module
            or (again and may_be_checkpointed())
        ):  # fmt: skip
            return dispatch(patch, self, args, kwargs)
        if not observes:
            refuse_traced(module)
        next_key()
        return body(*args, **kwargs)

    return forward
