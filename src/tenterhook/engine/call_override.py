"""An override of a module's whole call that installs edited parameters before the module's pre-hooks run.

Forward pre-hooks may read a parameter, for example to compute a normalised weight from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tenterhook.engine import recompute
from tenterhook.engine.dispatch import OWN_FILES
from tenterhook.pytorch.module_calls import GLOBAL_FORWARD_PRE_HOOKS, call_with_hooks, forward_pre_hooks_of
from tenterhook.pytorch.python_code import own_frame

if TYPE_CHECKING:
    from tenterhook.engine.install import ForwardPatch
    from tenterhook.sites.parameter import Exchange

__all__ = ["HookedAttributes", "around"]

OWN_FILES.add(__file__)


def _usual(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run PyTorch's usual call, with all hooks and the installed forward."""
    return call_with_hooks(module, args, kwargs, own_frame(2))


def around(patch: ForwardPatch) -> Callable[..., Any]:
    """Return a replacement for a module's call that installs the edited parameters before its hooks run."""

    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        swaps = recompute.swaps(patch) if self is patch.module else []
        if not swaps:
            return _usual(self, args, kwargs)
        entered: list[Exchange] = []
        attributes = HookedAttributes(self)
        patch.attributes.append(attributes)
        try:
            for swap in swaps:
                entered.append(swap)
                swap.enter()
            swaps[0].add_undo(attributes.put_back)
            return _usual(self, args, kwargs)
        finally:
            patch.attributes.remove(attributes)
            for swap in reversed(entered):
                swap.leave()

    return call


class HookedAttributes:
    """The tensors that a module's pre-hooks set as plain attributes, with the values they had before the hooks ran."""

    __slots__ = ("_before", "_changed", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        hooked = forward_pre_hooks_of(module) or GLOBAL_FORWARD_PRE_HOOKS
        self._before = self._tensors() if hooked else None
        self._changed: dict[str, Tensor | None] = {}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._module.__dict__.items() if isinstance(value, Tensor)}

    def compare(self) -> None:
        """Note the attributes that changed. Call this after all pre-hooks have run and before the forward."""
        if self._before is not None:
            before, self._before = self._before, None
            changed = [name for name, value in self._tensors().items() if before.get(name) is not value]
            self._changed = {name: before.get(name) for name in changed}

    def put_back(self) -> None:
        """Restore the changed attributes when the original parameter is restored."""
        for name, value in self._changed.items():
            if value is None:
                self._module.__dict__.pop(name, None)
            else:
                setattr(self._module, name, value)
        self._changed = {}
