"""A check at the start of a session for actions that cannot be part of a graph with ``fullgraph=True``.

``fullgraph=True`` is known at the start if the session is opened on the result of ``torch.compile``, or on a model on
which ``compile()`` was called. If the model is compiled separately, the first call raises the error: see
:mod:`tenterhook.compiled.explain_errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from tenterhook.address.walk import wrappers_at
from tenterhook.compiled.explain_errors import REPLACED
from tenterhook.compiled.inner_values import NO_SOURCE
from tenterhook.compiled.served_calls import UNDECIDED
from tenterhook.compiled.trace import Untraceable
from tenterhook.compiled.trace_plan import FOREIGN, part_of
from tenterhook.errors import SessionError, UnsupportedTorch
from tenterhook.pytorch.dynamo import (
    begins_outside_of,
    is_fullgraph,
    original_module,
    settings_of_compiled_call,
)
from tenterhook.pytorch.dynamo_tracing import OptimizedModule, is_forced_eager, is_skipped, settings_of_wrapper
from tenterhook.pytorch.module_calls import GLOBAL_FORWARD_HOOKS, forward_hooks_of
from tenterhook.pytorch.replaced import replacement_of_module_call
from tenterhook.sites.module import compiled_call

if TYPE_CHECKING:
    from tenterhook.engine.install import ModuleActions
    from tenterhook.engine.session import Session

__all__ = ["check"]

WHOLE = (
    "{what} is in a model that was compiled with fullgraph=True, and cannot be part of its graph: {why}.\n"
    "Compile the model without fullgraph=True, which allows a graph break there, or run it without compiling: under "
    "torch.compiler.set_stance('force_eager')."
)
STOPS = "a stop leaves the graph of a PyTorch module as an exception, which fullgraph=True does not allow"
WRITTEN = "the calls of a run are recorded in Python, for a replay"


def check(session: Session) -> None:
    """Raise :class:`SessionError` if an action of the session cannot be part of a graph with ``fullgraph=True``."""
    if is_forced_eager():
        return
    whole = [(path, outer) for module, path in session.entries.items() for outer in _outers(session, module, path)]
    if whole and getattr(session, "learns", False):
        raise SessionError(WHOLE.format(what="a call to serve", why=WRITTEN))
    for path, outer in whole:
        for actions in session.action_sets.values():
            if path and not f"{actions.path}.".startswith(f"{path}."):
                continue
            what = repr(actions.path) if actions.path else "the model itself"
            why = _why_not(actions, outer)
            if why is not None:
                raise SessionError(WHOLE.format(what=what, why=why.removeprefix("tenterhook: ")))
            by = replacement_of_module_call() if isinstance(outer, OptimizedModule) else None
            if by is not None and _why_not_outside(actions) is not None:
                raise UnsupportedTorch(REPLACED.format(what=what, by=by))


def _outers(session: Session, module: nn.Module, path: str) -> list[nn.Module]:
    """Return the module, or its wrappers from ``torch.compile``, if they were compiled with ``fullgraph=True``."""
    compiled = [each for each in wrappers_at(session.model, path) if isinstance(each, OptimizedModule)]
    outers = [each for each in compiled if original_module(each) is module]
    if outers:
        return [each for each in outers if is_fullgraph(settings_of_wrapper(each))]
    return [module] if is_fullgraph(settings_of_compiled_call(compiled_call(module))) else []


def _why_not(actions: ModuleActions, outer: nn.Module) -> str | None:
    """Return the reason why the actions at a module cannot be traced, or None."""
    try:
        part = part_of(actions)
    except Untraceable as error:
        return str(error)
    if actions.guard is not None and part.serve_spec is None:
        return WRITTEN
    if (actions.edits_out or actions.looks_out) and (forward_hooks_of(actions.module) or GLOBAL_FORWARD_HOOKS):
        return FOREIGN
    if any(binding.point.spot is not None and binding.point.spot.operation for binding in actions.inner):
        return NO_SOURCE
    return _why_not_outside(actions) if _begins_outside(outer) else None


def _why_not_outside(actions: ModuleActions) -> str | None:
    """Return the reason, for a graph that begins before the compiled module's own forward, or None."""
    if actions.prepares:
        return UNDECIDED
    bindings = (*actions.looks_out, *actions.inner, *(binding for _, binding in actions.looks_in))
    return STOPS if any(binding.action.stops for binding in bindings) else None


def _begins_outside(outer: nn.Module) -> bool:
    """Return whether the graph begins before the compiled module's own forward, in which a stop could be caught."""
    if isinstance(outer, OptimizedModule):
        return is_skipped(type(original_module(outer)).forward)
    return begins_outside_of(compiled_call(outer))
