"""The plan of what is traced for a session's actions: steps in order of execution, all decided before tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tenterhook.compiled.inner_values import body_of
from tenterhook.compiled.opaque_edits import CalledEdit
from tenterhook.compiled.served_calls import UNDECIDED, served
from tenterhook.compiled.trace import (
    TracedContext,
    Uncompilable,
    Untraceable,
    measured,
    passed,
    recorded,
    refused,
    traced,
)
from tenterhook.engine.action import Context
from tenterhook.pytorch.dynamo_probe import can_trace_hooks
from tenterhook.pytorch.module_calls import GLOBAL_FORWARD_HOOKS, forward_hooks_of
from tenterhook.sites.parameter import Swap

if TYPE_CHECKING:
    from tenterhook.address import Point
    from tenterhook.compiled.graph_outputs import GraphOutputs
    from tenterhook.engine.action import Binding
    from tenterhook.engine.install import ForwardPatch, ModuleActions

__all__ = ["FOREIGN", "Step", "TracedPart", "is_uncompilable", "part_of", "reason_at", "traced_forward"]

FOREIGN = "tenterhook: this module has forward hooks of another library, which run before values are recorded"
LATER = "tenterhook: this session was opened before torch.compile was used; open a new session"
UNTRACED = "tenterhook: {kind} at {address!r} cannot be traced"
FUSED = "tenterhook: a fused layer must call its children"
FLAT = "tenterhook: the recurrent layer of the edited parameter stores its weights a second time:"
KEPT = "tenterhook: the edited parameter, or a weight computed from it, is stored outside of module dicts:"
GATHERED = "tenterhook: gather=True gathers values from all processes"
NO_HOOKS = "tenterhook: this release of torch cannot trace tensor hooks, and the gradient of {address!r} needs one"


class Step:
    """One action at one point, in the form that is traced."""

    __slots__ = (
        "address", "called", "check", "context", "copies", "dtype", "function", "gradient", "measures",
        "observes", "opaque", "part", "plain", "row", "stops", "tables", "token",
    )  # fmt: skip

    def __init__(self, binding: Binding, actions: ModuleActions) -> None:
        point, action = binding.point, binding.action
        kind = action.compiled
        if kind is None:
            raise Untraceable(UNTRACED.format(kind=type(action).__name__, address=point.address))
        self.address, self.observes = str(point), action.observes
        self.gradient = kind in ("gradient", "gradient edit")
        self.measures = kind == "measured"
        self.tables, self.row = action.slots if self.measures else (None, -1)  # type: Any, int
        if self.gradient and not can_trace_hooks():
            raise Uncompilable(NO_HOOKS.format(address=point.address))
        self.stops = action.stops
        self.opaque = self.check = self.copies = self.plain = False
        self.dtype = self.context = self.part = self.token = self.called = None  # type: Any
        self.function: Any = None
        if kind == "value":
            self._look(action)
        elif not self.observes:
            self._change(action, TracedContext(point.address, point.module))
            if self.opaque or point.call is not None:
                self._call_back(action, point, Context(point.address, 0, point.module, actions.session))

    def _look(self, action: Any) -> None:
        policy = action.policy
        if policy.gather:
            raise Untraceable(GATHERED)
        self.copies, self.dtype = policy.copy != "never", policy.dtype
        self.plain = self.copies and self.dtype is None

    def _change(self, action: Any, context: TracedContext) -> None:
        change = action.change
        self.context, self.check = context, action.check
        # An edit that reads the call index or the tape can only run when the graph runs.
        self.opaque = change.opaque or (change.takes_context and not change.ready)
        self.function = change.call if change.takes_context else _of_value(change.call)
        part = change.part
        self.part = part if part is None or isinstance(part, tuple) else (part,)

    def _call_back(self, action: Any, point: Point, context: Context) -> None:
        self.opaque = True
        self.called = CalledEdit(self.function, action.change.name, point, context)
        self.token = self.called.token


def _of_value(call: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def function(value: Any, _context: Any) -> Any:
        return call(value)

    return function


class Exchanged:
    """The edit of a parameter, in the form that is traced. All modules around which it is swapped share one."""

    __slots__ = ("binding", "found", "places", "step", "swap")

    def __init__(self, swap: Swap, binding: Binding, actions: ModuleActions) -> None:
        if swap.flat:
            raise Untraceable(f"{FLAT} at {binding.point.address!r}")
        if swap.derived or any(not isinstance(table, dict) for table, _ in swap.places):
            raise Untraceable(f"{KEPT} at {binding.point.address!r}")
        # The swap is done once, by the engine around the graph or inside it, so both share one depth counter.
        self.swap, self.places, self.binding = swap, swap.places, binding
        self.step = Step(binding, actions)
        self.found: Any = None


class Bound:
    """The bindings of a part's steps, in the same order."""

    __slots__ = ("edits_in", "edits_out", "inner", "looks_in", "looks_out", "swapped")

    def __init__(self, actions: ModuleActions) -> None:
        self.edits_in = tuple([binding for _, binding in actions.edits_in])
        self.looks_in = tuple([binding for _, binding in actions.looks_in if _acts(binding)])
        self.edits_out = tuple([binding for binding in actions.edits_out if _acts(binding)])
        self.looks_out = tuple([binding for binding in actions.looks_out if _acts(binding)])
        self.inner = actions.inner
        self.swapped: tuple[Binding, ...] = ()


class TracedPart:
    """The steps of one session at one module.

    Dynamo does not read ``actions``, ``bound``, ``recorder`` or ``running``.
    """

    __slots__ = (
        "actions",
        "bound",
        "called",
        "edits_in",
        "edits_out",
        "graph_outputs",
        "inner",
        "key",
        "looks_in",
        "looks_out",
        "recorder",
        "running",
        "serve_spec",
        "swaps",
    )  # fmt: skip

    def __init__(self, actions: ModuleActions, graph_outputs: GraphOutputs) -> None:
        self.graph_outputs, self.actions, self.bound = graph_outputs, actions, Bound(actions)
        ahead = actions.guard.ahead if actions.guard is not None else None
        self.serve_spec = ahead.serve_specs.get(actions.module) if ahead is not None else None
        self.running: list[int] = []
        self.edits_in = tuple([(place, Step(binding, actions)) for place, binding in actions.edits_in])
        self.looks_in = tuple([(place, Step(each, actions)) for place, each in actions.looks_in if _acts(each)])
        self.edits_out = tuple([Step(binding, actions) for binding in self.bound.edits_out])
        self.looks_out = tuple([Step(binding, actions) for binding in self.bound.looks_out])
        called = [binding.action for binding in actions.looks_out if binding.action.called is not None]
        self.called: Any = called[0] if called else None
        self.inner = tuple([Step(binding, actions) for binding in actions.inner])
        self.swaps = tuple([_exchanged(swap, actions, graph_outputs) for swap in actions.swaps])
        self.bound.swapped = tuple([swap.binding for swap in self.swaps])
        self.key = graph_outputs.key_for(self)
        self.recorder: Any = self.bound.looks_out[0].action if self.only_output else None

    @property
    def empty(self) -> bool:
        """True if there is nothing to do."""
        edits = self.edits_in or self.edits_out or self.swaps
        return not (edits or self.looks_in or self.inner or self.looks_out or self.serve_spec)

    @property
    def only_output(self) -> bool:
        """True if the only step records the plain output of every call."""
        if self.edits_in or self.looks_in or self.edits_out or self.inner or self.swaps or self.serve_spec is not None:
            return False
        if len(self.looks_out) != 1:
            return False
        step = self.looks_out[0]
        if step.measures or self.called is not None:
            return False
        return step.plain and not step.gradient and not step.stops and self.bound.looks_out[0].point.call is None

    @property
    def only_measures(self) -> bool:
        """True if the only step measures the output of every call."""
        others = self.edits_in or self.looks_in or self.edits_out or self.inner or self.swaps
        if others or self.serve_spec is not None or len(self.looks_out) != 1:
            return False
        return self.looks_out[0].measures and self.bound.looks_out[0].point.call is None


def _acts(binding: Binding) -> bool:
    """Return whether there is something to trace. Some actions have a second half that only does clean-up."""
    return binding.action.compiled != "nothing"


def _exchanged(swap: Any, actions: ModuleActions, graph_outputs: GraphOutputs) -> Exchanged:
    if not isinstance(swap, Swap) or swap.binding is None:
        raise Untraceable(FUSED)
    known = graph_outputs.swaps.get(id(swap))
    if known is None:
        known = graph_outputs.swaps[id(swap)] = Exchanged(swap, swap.binding, actions)
    return known


def traced_forward(patch: ForwardPatch, engine: Callable[..., Any], *, begins: bool = False) -> Callable[..., Any]:
    """Return the function that Dynamo traces instead of a patch's forward.

    ``engine`` does what cannot be traced. ``begins`` is True if compiled code begins here, so that guards were
    prepared.
    """
    try:
        parts = tuple([part for part in map(part_of, patch.action_sets) if not part.empty])
        body = _served(patch, body_of(patch, parts), begins=begins)
    except Untraceable as error:
        return refused(reason_at(error, patch), engine)
    if not parts:
        return passed(patch.module, patch.original)
    if forward_hooks_of(patch.module) or GLOBAL_FORWARD_HOOKS:
        return refused(reason_at(FOREIGN, patch), engine)
    if len(parts) == 1 and parts[0].only_output:
        return recorded(patch.module, patch.original, parts[0])
    if len(parts) == 1 and parts[0].only_measures:
        return measured(patch.module, patch.original, parts[0])
    return traced(patch.module, body, parts)


def is_uncompilable(patch: ForwardPatch) -> bool:
    """Return whether the current actions forbid compiling any part of the module's calls."""
    try:
        for actions in patch.action_sets:
            part_of(actions)
    except Untraceable as error:
        return isinstance(error, Uncompilable)
    return False


def reason_at(reason: Untraceable | str, patch: ForwardPatch) -> str:
    """Return a reason with the path of its module."""
    text, path = str(reason), patch.action_sets[0].path if patch.action_sets else ""
    return text if " at '" in text else f"{text}, at {path or ':return'!r}"


def _served(patch: ForwardPatch, body: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
    """Return the module's forward, or one that serves the calls of replays."""
    for actions in patch.action_sets:
        guard, serve_spec = actions.guard, actions.part.serve_spec
        if guard is None:
            continue
        if serve_spec is None or (guard.prepare is not None and not begins):
            raise Untraceable(UNDECIDED)
        body = served(actions.part, serve_spec, body)
    return body


def part_of(actions: ModuleActions) -> Any:
    """Return the traced part of a module's actions, or raise :class:`Untraceable`."""
    if actions.part is None:
        if actions.session.graph_outputs is None:
            raise Untraceable(LATER)
        actions.part = TracedPart(actions, actions.session.graph_outputs)
    return actions.part
