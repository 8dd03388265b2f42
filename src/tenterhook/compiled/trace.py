"""The code that Dynamo traces at a touched module, instead of the engine's dispatch.

A forward of the engine carries the function made here as the function for Dynamo to inline. Without the compiler, this
costs nothing. The code here is traced: plain loops over tuples, which Dynamo unrolls; no state except the graph
outputs; and nothing is read that would create a guard on one session. A second session with the same plan therefore
reuses the compiled code of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook.compiled.explain_errors import CHANGED_KIND, note_edit, note_view
from tenterhook.compiled.opaque_edits import opaque
from tenterhook.compiled.traced_gradients import ChangeGradient, TracedGradientHook, changed_gradient
from tenterhook.compiled.traced_statistics import measured_output, measured_value
from tenterhook.errors import Stopped
from tenterhook.pytorch.dynamo_tracing import graph_break, view_base
from tenterhook.pytorch.tracing import is_exporting
from tenterhook.sites.module import MISSING

if TYPE_CHECKING:
    from tenterhook.compiled.trace_plan import Step, TracedPart

__all__ = ["TracedContext", "Uncompilable", "Untraceable", "at_place", "measured", "refused", "traced"]

EXPORTED = "tenterhook: close the session before torch.export, or its actions become part of the exported program"
WALK = "tenterhook: inside a graph, the gradient of a structure must be in tuples, lists or dicts to be recorded"
KIND = f"tenterhook: {CHANGED_KIND}"


class Untraceable(Exception):
    """Something that must run in the engine, outside the graph. It is always caught inside this package."""


class Uncompilable(Untraceable):
    """Something for which no part of the module's call may be compiled.

    The gradient of an output that a graph returns does not include its uses inside the graph.
    """


class TracedContext:
    """The context of a ready edit that is traced. An edit that needs more runs as an opaque edit."""

    __slots__ = ("address", "module")

    def __init__(self, address: str, module: nn.Module) -> None:
        self.address, self.module = address, module


def refused(reason: str, engine: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that breaks the graph, so that the engine does what cannot be traced."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        graph_break(msg=reason)
        return engine(*args, **kwargs)  # Reached only where compiled code begins; elsewhere Dynamo calls the engine.

    return forward


def passed(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward without actions, for a module that only is the beginning of compiled code."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] is module:  # Dynamo versions differ in whether they bind a function that they inline.
            args = args[1:]
        return original(*args, **kwargs)

    return forward


def recorded(module: nn.Module, original: Callable[..., Any], part: TracedPart) -> Callable[..., Any]:
    """Return a forward that only records the output. It is the most frequent one, and has the fewest guards."""
    graph_outputs, key = part.graph_outputs, part.key
    call = unbound(module, original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] is module:
            args = args[1:]
        if is_exporting():
            graph_break(msg=EXPORTED)
        value = call(module, *args, **kwargs)
        chain = graph_outputs.chain
        graph_outputs.chain = (chain, key, "one", own_copy(value), counted(chain))
        graph_outputs.done_signal = None
        return value

    return forward


def measured(module: nn.Module, original: Callable[..., Any], part: TracedPart) -> Callable[..., Any]:
    """Return a forward that only measures the output and its gradient, in the graph.

    It reads little of what is around it, because each object that traced code reads is checked before each run.
    """
    tables, row = part.looks_out[0].tables, part.looks_out[0].row
    call = unbound(module, original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] is module:
            args = args[1:]
        if is_exporting():
            graph_break(msg=EXPORTED)
        return measured_output(tables, row, call(module, *args, **kwargs))

    return with_arguments(module, forward, part) if part.called else forward


def with_arguments(module: nn.Module, forward: Callable[..., Any], part: TracedPart) -> Callable[..., Any]:
    """Return a forward that also adds its arguments to the graph outputs."""
    graph_outputs, key = part.graph_outputs, part.key

    def noted(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] is module:
            args = args[1:]
        value = forward(*args, **kwargs)
        chain = graph_outputs.chain
        graph_outputs.chain = (chain, key, "call", (args, kwargs), counted(chain))
        graph_outputs.done_signal = None
        return value

    return noted


def unbound(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward as a function of its module. A bound method would need a guard on its ``__self__``."""
    if isinstance(original, MethodType) and original.__self__ is module:
        return original.__func__

    def call(_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return call


def traced(module: nn.Module, body: Callable[..., Any], parts: tuple[TracedPart, ...]) -> Callable[..., Any]:
    """Return a forward that runs the steps of all parts, one part per session."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] is module:
            args = args[1:]
        if is_exporting():
            graph_break(msg=EXPORTED)
        for part in parts:
            for index, swap in enumerate(part.swaps):
                enter_swap(part, index, swap)
        args, kwargs = income(parts, args, kwargs)
        value = outcome(parts, body(*args, **kwargs), (args, kwargs))
        for part in parts:
            for swap in part.swaps:
                leave_swap(swap)
        return value

    return forward


def income(parts: tuple[TracedPart, ...], args: Any, kwargs: Any) -> Any:
    """Return the arguments after the edits; the observers see these. Gradients are handled as in ``outcome``."""
    pending: list[Any] = []
    done: list[Any] = []
    for part in parts:
        flags = []
        for place, step in part.edits_in:
            if not step.gradient:
                args, kwargs = through(pending, args, kwargs)
                pending = []
            value = place.get(args, kwargs)
            new, applied = (MISSING, False) if value is MISSING else changed(step, value)
            if step.gradient and applied:
                pending.append((place, step))
            elif applied:
                args, kwargs = place.put(args, kwargs, new)
            flags.append(applied)
        done.append(tuple(flags))
    for part, flagged in zip(parts, done, strict=True):
        args, kwargs = look_in(part, flagged, args, kwargs)
    return through(pending, args, kwargs)


def look_in(part: TracedPart, flags: Any, args: Any, kwargs: Any) -> Any:
    """Call the observers of the arguments. Return the arguments, with gradient hooks where gradients are recorded."""
    seen: list[Any] = []
    for place, look in part.looks_in:
        value = place.get(args, kwargs)
        if value is MISSING:
            seen.append(MISSING)
        elif look.gradient:
            new, mark = caught(part, value, look.address)
            args, kwargs = place.put(args, kwargs, new)
            seen.append(mark)
        else:
            seen.append(own(value, look))
    emit(part, "in", (flags, tuple(seen)))
    for _, look in part.looks_in:
        stop_after(part, look)
    return args, kwargs


def through(pending: list[Any], args: Any, kwargs: Any) -> Any:
    """Return the arguments, passed through the pending edits of their gradients."""
    for place, step in reversed(pending):
        args, kwargs = place.put(args, kwargs, each_gradient(place.get(args, kwargs), step))
    return args, kwargs


def outcome(parts: tuple[TracedPart, ...], value: Any, given: Any) -> Any:
    """Return the output after the edits; the observers see this value. ``given`` are the arguments of the call.

    In the backward pass, gradient edits run in the order of their sessions, and recording comes last. Functions that
    the value passes in the forward pass are therefore applied in the opposite order, and hooks in this order.
    """
    pending: list[Any] = []
    done: list[Any] = []
    for part in parts:
        flags = []
        for step in part.edits_out:
            if not step.gradient:
                hook_gradients(pending, value, given)
                value = with_gradients(pending, value, given)
                pending = []
            new, applied = changed(step, value)
            if step.gradient and applied:
                pending.append(step)
            else:
                value = new
            flags.append(applied)
        done.append(tuple(flags))
    hook_gradients(pending, value, given)
    for part, flagged in zip(parts, done, strict=True):
        seen = []
        for look in part.looks_out:
            value, mark = looked_at(part, look, value, given)
            seen.append(mark)
        emit(part, "out", (flagged, tuple(seen)))
    for part in parts:
        for look in part.looks_out:
            stop_after(part, look)
    return with_gradients(pending, value, given)


def looked_at(part: TracedPart, look: Step, value: Any, given: Any) -> tuple[Any, Any]:
    """Return an output as an observer passes it on, and what leaves the graph for the observer."""
    if look.gradient:
        return caught(part, value, look.address, given)
    if look.measures:
        return measured_output(look.tables, look.row, value), MISSING
    return value, own(value, look)


def at_place(part: TracedPart, index: int, step: Step, value: Any) -> Any:
    """Run one step at a place inside a forward."""
    if not step.observes:
        new, applied = changed(step, value)
        if step.gradient and applied:
            new = with_gradients([step], value)
        emit(part, "at", (index, applied))
        return new
    if step.gradient:
        value, mark = caught(part, value, step.address)
        emit(part, "at", (index, mark))
    else:
        emit(part, "at", (index, own(value, step)))
    stop_after(part, step)
    return value


def emit(part: TracedPart, phase: str, values: Any, more: int = 0) -> None:
    """Add values to the graph outputs.

    Dynamo keeps the order of the first assignments, so the assignment to the done signal runs last.
    """
    graph_outputs = part.graph_outputs
    graph_outputs.chain = (graph_outputs.chain, part.key, phase, values, counted(graph_outputs.chain) + more)
    graph_outputs.done_signal = None


def counted(chain: Any) -> int:
    """Return the number of gradients to expect so far."""
    return chain[4] if chain else 0


def stop_after(part: TracedPart, look: Step) -> None:
    if not look.stops:
        return
    graph_outputs = part.graph_outputs
    left = tuple([address for address in graph_outputs.left if address != look.address])
    graph_outputs.left = left
    if not left:
        raise Stopped


def own(value: Any, look: Step) -> Any:
    """Return a value as a separate output, which later in-place operations in the graph do not change.

    Compilers remove the copy if nothing needs it. Of a value that is only measured, nothing is returned.
    """
    if look.measures:
        measured_value(look.tables, look.row, value)
        value = MISSING
    elif look.plain:
        value = own_copy(value)
    elif isinstance(value, Tensor):
        value = value.detach()
        if look.dtype is not None and value.is_floating_point():
            value = value.to(look.dtype)
        value = value.clone() if look.copies else value
    elif type(value) is tuple:
        value = tuple([own(part, look) for part in value])
    elif type(value) is list:
        value = [own(part, look) for part in value]
    elif type(value) is dict:
        value = {key: own(part, look) for key, part in value.items()}
    return value


def own_copy(value: Any) -> Any:
    """Return a detached copy of a value, without a change of dtype."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is tuple:
        return tuple([own_copy(part) for part in value])
    if type(value) is list:
        return [own_copy(part) for part in value]
    if type(value) is dict:
        return {key: own_copy(part) for key, part in value.items()}
    return value


def changed(step: Step, value: Any) -> tuple[Any, bool]:
    """Return the edited value, and whether the edit applies. A gradient edit applies if a tensor requires grad."""
    if step.gradient:
        return value, torch.is_grad_enabled() and any_gradient(value)
    note_edit(step.address)
    new = opaque(step, value) if step.opaque else step.function(value, step.context)
    if new is None:
        return value, True
    if step.check:
        check(value, new, step.address)
    return new, True


def check(old: Any, new: Any, address: str) -> None:
    """Break the graph if an edit changed the type, shape or dtype: the engine then raises a complete error."""
    if isinstance(old, Tensor):
        if not isinstance(new, Tensor) or old.shape != new.shape or old.dtype != new.dtype:
            graph_break(msg=KIND + " at '" + address + "'")
    elif type(old) is not type(new):
        graph_break(msg=KIND + " at '" + address + "'")


# -- gradients ---------------------------------------------------------------------------------------------------------


def any_gradient(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if type(value) is tuple or type(value) is list:
        return any([any_gradient(part) for part in value])  # noqa: C419  A generator would not be unrolled.
    if type(value) is dict:
        return any([any_gradient(part) for part in value.values()])  # noqa: C419
    return False


def takes_hook(value: Tensor, given: Any) -> bool:
    """Return whether a hook on an output gets the gradient of only this output, despite later in-place changes.

    This is so if the call created the tensor and it is not a view. ``given`` is None if the arguments are not known. In
    that case, and for other tensors, the value passes through a function. No in-place operation may change the result
    of that function.
    """
    return given is not None and view_base(value) is None and not value.is_leaf and not is_among(value, given)


def is_among(value: Tensor, given: Any) -> bool:
    if isinstance(given, Tensor):
        return given is value
    if type(given) is tuple or type(given) is list:
        return any([is_among(value, part) for part in given])  # noqa: C419  A generator would not be unrolled.
    if type(given) is dict:
        return any([is_among(value, part) for part in given.values()])  # noqa: C419
    return False


def hook_gradients(steps: list[Any], value: Any, given: Any) -> None:
    """Edit gradients with hooks, for the tensors that can have one."""
    for step in steps:
        each_hooked(value, step, given)


def each_hooked(value: Any, step: Step, given: Any, path: tuple[Any, ...] = ()) -> None:
    if isinstance(value, Tensor):
        meant = step.part is None or step.part == path
        if meant and value.requires_grad and takes_hook(value, given):
            value.register_hook(lambda gradient: changed_gradient(step, gradient))
    elif type(value) is tuple or type(value) is list:
        for i, part in enumerate(value):
            each_hooked(part, step, given, (*path, i))
    elif type(value) is dict:
        for key, part in value.items():
            each_hooked(part, step, given, (*path, key))


def with_gradients(steps: list[Any], value: Any, given: Any = None) -> Any:
    """Pass a value through the edits of its gradient. Tensors that have a hook for it are unchanged."""
    for step in reversed(steps):
        value = each_gradient(value, step, given=given)
    return value


def each_gradient(value: Any, step: Step, path: tuple[Any, ...] = (), given: Any = None) -> Any:
    if isinstance(value, Tensor):
        meant = step.part is None or step.part == path
        if not meant or not value.requires_grad or takes_hook(value, given):
            return value
        note_view(step.address)
        return ChangeGradient.apply(value, step)  # type: ignore[no-untyped-call]
    if type(value) is tuple:
        return tuple([each_gradient(part, step, (*path, i), given) for i, part in enumerate(value)])
    if type(value) is list:
        return [each_gradient(part, step, (*path, i), given) for i, part in enumerate(value)]
    if type(value) is dict:
        return {key: each_gradient(part, step, (*path, key), given) for key, part in value.items()}
    return value


def caught(part: TracedPart, value: Any, address: str, given: Any = None) -> tuple[Any, Any]:
    """Return the value with gradient hooks, and a mark: structure, numbers of the gradients, and why there are none."""
    graph_outputs = part.graph_outputs
    numbers: list[Any] = []
    if torch.is_grad_enabled():
        value = each_caught((graph_outputs.token, counted(graph_outputs.chain), address), value, (), numbers, given)
        emit(part, "gradients", (), len(numbers))
        why = "" if numbers else "no need"
    else:
        why = "no_grad"
    return value, (shape_of(value), tuple(numbers), why)


def each_caught(run: Any, value: Any, path: tuple[Any, ...], numbers: list[Any], given: Any) -> Any:
    """Add a hook to each tensor. ``run`` is the run's token, the number of the first gradient, and the address."""
    if isinstance(value, Tensor):
        return one_caught(run, value, path, numbers, given) if value.requires_grad else value
    if type(value) is tuple:
        return tuple([each_caught(run, part, (*path, i), numbers, given) for i, part in enumerate(value)])
    if type(value) is list:
        return [each_caught(run, part, (*path, i), numbers, given) for i, part in enumerate(value)]
    if type(value) is dict:
        return {key: each_caught(run, part, (*path, key), numbers, given) for key, part in value.items()}
    if value is not None and not isinstance(value, int | float | str):
        graph_break(msg=WALK + " at '" + run[2] + "'")
    return value


def one_caught(run: Any, value: Tensor, path: tuple[Any, ...], numbers: list[Any], given: Any) -> Any:
    token, first, address = run
    number = first + len(numbers)
    numbers.append((path, number))
    if takes_hook(value, given):
        value.register_hook(lambda gradient: torch.ops.tenterhook.caught(gradient, token, number))
        return value
    note_view(address)
    return TracedGradientHook.apply(value, token, number)  # type: ignore[no-untyped-call]


def shape_of(value: Any) -> Any:
    """Return the structure with None for each tensor."""
    if type(value) is tuple:
        return tuple([shape_of(part) for part in value])
    if type(value) is list:
        return [shape_of(part) for part in value]
    if type(value) is dict:
        return {key: shape_of(part) for key, part in value.items()}
    return None if isinstance(value, Tensor) else value


# -- parameters --------------------------------------------------------------------------------------------------------


def enter_swap(part: TracedPart, index: int, swap: Any) -> None:
    """Replace a parameter with its edited value, unless an outer call has done so."""
    if swap.swap.depth == 0:
        table, key = swap.places[0]
        found = table[key]
        made, _ = changed(swap.step, found)
        for table, key in swap.places:
            table[key] = made
        swap.found = found
        emit(part, "swap", index)
    swap.swap.depth += 1


def leave_swap(swap: Any) -> None:
    swap.swap.depth -= 1
    if swap.swap.depth == 0:
        for table, key in swap.places:
            table[key] = swap.found
        swap.found = None
