"""The shared forwards that edit the outputs of modules, or skip modules, for a session that edits nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from tenterhook.engine.action import Context, SkipAction
from tenterhook.engine.dispatch import OWN_FILES
from tenterhook.engine.refuse_tracing import refuse_traced
from tenterhook.engine.shared_forward import SharedForwards
from tenterhook.pytorch.autograd import current_backward_id
from tenterhook.pytorch.checkpointing import is_inside_checkpoint, may_be_checkpointed
from tenterhook.pytorch.module_calls import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS
from tenterhook.pytorch.python_code import own_frame
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenterhook.engine.action import Binding
    from tenterhook.engine.session import Session
    from tenterhook.engine.shared_forward import Forward

__all__ = ["OutputEdits"]

OWN_FILES.add(__file__)


class OutputEdits(SharedForwards):
    """The bindings of an editing session, all at outputs of modules. ``modules`` counts the calls of each module."""

    __slots__ = ("_bound", "_skips")

    serves_bindings = True

    def __init__(self, session: Session, bindings: Sequence[Binding]) -> None:
        bound: dict[nn.Module, list[Binding]] = {}
        for binding in bindings:
            bound.setdefault(binding.point.module, []).append(binding)
        self._bound = bound
        # The last one decides the output. All run afterwards, like other edits.
        self._skips = {each.point.module: each.action for each in bindings if isinstance(each.action, SkipAction)}
        SharedForwards.__init__(self, session, dict.fromkeys(bound, 0))

    def path_of(self, module: nn.Module) -> str:
        """Return the path of a module."""
        return self._bound[module][0].point.path

    def bindings_of(self, module: nn.Module) -> tuple[list[Binding], int]:
        """Return the bindings that replace the shared forward of a module, and how many of its calls have begun."""
        return self._bound[module], self.modules[module]

    def install(self) -> None:
        """Install the functions. torch.jit.script refuses each edited module: the script would lack the edit."""
        SharedForwards.install(self)
        for module in tuple(self.modules):  # Another thread may take a module over now.
            self._refuse_script(module)

    def remove(self) -> list[str]:
        """Remove the functions. A call that is still running is not edited."""
        replaced = SharedForwards.remove(self)
        self._bound.clear()
        self._skips.clear()
        return replaced

    def make_forward(self, original: Forward) -> Forward:
        """Return the forward that edits the outputs of one class."""
        calls, bound, skips, owner, session = self.modules, self._bound, self._skips, current.token, self._session
        assert session is not None  # noqa: S101  It has not started yet.

        def forward(self_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            call = calls.get(self_)
            if (
                call is None or current.token != owner or current_backward_id() != -1
                or (may_be_checkpointed() and is_inside_checkpoint(own_frame(1)))
            ):  # fmt: skip
                return self.other(self_)(*args, **kwargs)
            refuse_traced(self_)
            calls[self_] = call + 1
            skip = skips.get(self_)
            if skip is None:
                value = original(self_, *args, **kwargs)
            else:
                value = skip.output(args, kwargs, Context(bound[self_][0].point.address, call, self_, session))
            if self_.__dict__[FORWARD_HOOKS] or GLOBAL_FORWARD_HOOKS:
                return self.finish(self_, call, value)
            for binding in bound.get(self_, ()):  # Empty after the end of the session.
                value = binding.action(value, Context(binding.point.address, call, self_, session))
            return value

        return forward
