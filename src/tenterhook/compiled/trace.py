"""What Dynamo traces at a touched module, in place of the engine's dispatch.

A forward of the engine's carries the function made here under the name by which Dynamo asks for something else to
inline; where nobody compiles, nothing is the slower for it. What stands here is traced: plain loops over tuples that
unroll, no state but the graph outputs, and nothing read that a guard would then hold to one session. So a second
session with the same plan finds the code of the first.
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
from tenterhook.errors import Stopped
from tenterhook.pytorch.dynamo_tracing import graph_break, view_base
from tenterhook.pytorch.tracing import is_exporting
from tenterhook.sites.module import MISSING

if TYPE_CHECKING:
    from tenterhook.compiled.trace_plan import Step, TracedPart

__all__ = ["TracedContext", "Uncompilable", "Untraceable", "at_place", "refused", "traced"]

EXPORTED = "tenterhook: close the session before torch.export, or what it does would become part of the program"
WALK = "tenterhook: the gradient of a structure that is no tuple, list or dict cannot be caught inside a graph"
KIND = f"tenterhook: {CHANGED_KIND}"


class Untraceable(Exception):
    """Something that has to be left to the engine, outside of the graph; it goes no further than this room."""


class Uncompilable(Untraceable):
    """The same, where no part of the module's call may be compiled.

    The gradient of an output that a graph returns is not that of its uses inside the graph.
    """


class TracedContext:
    """The context of a ready edit that is traced. What asks for more is called from the graph instead."""

    __slots__ = ("address", "module")

    def __init__(self, address: str, module: nn.Module) -> None:
        self.address, self.module = address, module


def refused(reason: str, engine: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that leaves the graph, so that the engine itself does what cannot be traced."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        graph_break(msg=reason)
        return engine(*args, **kwargs)  # It gets here where compiled code begins; elsewhere Dynamo calls the engine.

    return forward


def passed(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that does nothing: of a module at which compiled code begins, and nothing else is asked."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] is module:  # Versions of Dynamo differ in whether they bind what they inline.
            args = args[1:]
        return original(*args, **kwargs)

    return forward


def recorded(module: nn.Module, original: Callable[..., Any], part: TracedPart) -> Callable[..., Any]:
    """The most frequent by far, with the fewest guards: keep the output, and nothing else."""
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
        graph_outputs.bell = None
        return value

    return forward


def unbound(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is given its module: a bound method would cost a guard on whose it is."""
    if isinstance(original, MethodType) and original.__self__ is module:
        return original.__func__

    def call(_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return call


def traced(module: nn.Module, body: Callable[..., Any], parts: tuple[TracedPart, ...]) -> Callable[..., Any]:
    """A forward that does what the parts say: one for each session that has something here."""

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
    """The arguments after the edits; then what observes sees them. Of gradients, as in ``outcome``."""
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
    """What observes sees the arguments; one whose gradient is caught is handed on."""
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
    """The arguments, those with edits of their gradients handed on through them."""
    for place, step in reversed(pending):
        args, kwargs = place.put(args, kwargs, each_gradient(place.get(args, kwargs), step))
    return args, kwargs


def outcome(parts: tuple[TracedPart, ...], value: Any, given: Any) -> Any:
    """Return the output after the edits; what observes sees it then. ``given`` are the arguments of the call.

    Edits of a gradient act on their way back in the order of their sessions, and what records it comes last. Functions
    that the value passes forward are therefore applied in the opposite order, and hooks in this one.
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
            if look.gradient:
                value, mark = caught(part, value, look.address, given)
                seen.append(mark)
            else:
                seen.append(own(value, look))
        emit(part, "out", (flagged, tuple(seen)))
    for part in parts:
        for look in part.looks_out:
            stop_after(part, look)
    return with_gradients(pending, value, given)


def at_place(part: TracedPart, index: int, step: Step, value: Any) -> Any:
    """A place inside a forward."""
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
    """Add to the graph outputs. Assignments keep the order of the first ones, so the done signal is the last."""
    graph_outputs = part.graph_outputs
    graph_outputs.chain = (graph_outputs.chain, part.key, phase, values, counted(graph_outputs.chain) + more)
    graph_outputs.bell = None


def counted(chain: Any) -> int:
    """How many gradients the graph will bring, so far."""
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
    """A value as an output of its own: what the graph does to it later, in place, does not reach it.

    Compilers take the copy out again where nothing follows that needs it.
    """
    if look.plain:
        return own_copy(value)
    if isinstance(value, Tensor):
        value = value.detach()
        if look.dtype is not None and value.is_floating_point():
            value = value.to(look.dtype)
        return value.clone() if look.copies else value
    if type(value) is tuple:
        return tuple([own(part, look) for part in value])
    if type(value) is list:
        return [own(part, look) for part in value]
    if type(value) is dict:
        return {key: own(part, look) for key, part in value.items()}
    return value


def own_copy(value: Any) -> Any:
    """The same, where nothing particular was asked for."""
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
    """What an edit makes of a value, and whether it was made: that of a gradient, whether there is one."""
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
    """Leave the graph where an edit does not fit: the engine then says so in full."""
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
    """Return whether a hook on an output sees the gradient of this output alone, whatever is changed in place later.

    It does if the call has made the tensor, and it is no view. ``given`` is None where the arguments are not known;
    then, and for other tensors, the value passes through a function, whose result no in-place operation may change.
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
    """Edit the gradients of those tensors that take a hook."""
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
    """Pass a value through the edits of its gradient; tensors that take a hook have them already."""
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
    """Return a value whose gradient will be caught; its shape, the numbers of its gradients, and why there is none."""
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
    """The same for each tensor; ``run`` is the token of this run, the number of the first gradient, and the address."""
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
    """The structure with None for each tensor."""
    if type(value) is tuple:
        return tuple([shape_of(part) for part in value])
    if type(value) is list:
        return [shape_of(part) for part in value]
    if type(value) is dict:
        return {key: shape_of(part) for key, part in value.items()}
    return None if isinstance(value, Tensor) else value


# -- parameters --------------------------------------------------------------------------------------------------------


def enter_swap(part: TracedPart, index: int, swap: Any) -> None:
    """Put another tensor in a parameter's place, unless an outer call has."""
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
