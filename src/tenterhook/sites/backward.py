"""Backward hooks of a module, without the faults of PyTorch's own.

PyTorch passes a module's inputs and outputs through a custom function whose results are views, which no in-place
operation may touch. Here the inputs pass through a :class:`Gate` that hands on copies where the module may change them
in place. A single output carries a tensor hook, which survives whatever is done to the output later; several pass
through a gate of their own, because their gradients are seen together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import Path, replace_at, tensors
from tenterhook.errors import HookError
from tenterhook.pytorch.autograd import is_older, next_operation_number, own_alias, storage_identity
from tenterhook.pytorch.hook_tables import FORWARD, FORWARD_ALWAYS_CALLED, FORWARD_PRE, FORWARD_PRE_WITH_KWARGS
from tenterhook.pytorch.module_calls import forward_pre_hooks_of
from tenterhook.sites.inplace import model_changes_in_place
from tenterhook.sites.tensor import Counter, hook_tensor
from tenterhook.sites.threads import current

__all__ = ["BackwardHooks", "backward_hooks", "name_of"]

Gradients = tuple[Tensor | None, ...]
Hook = Callable[..., Any]

KEY = "tenterhook-backward"

OVERLAP = (
    "outputs of {module} share memory with one another, or with an input, and were changed in place after it returned, "
    "so that their gradients cannot be told apart by a backward hook. Return copies: .clone()"
)
NO_SIGN = (
    "{module} has a backward hook and changed an input in place, which nothing in its code foretold. Say that it does, "
    "by module.inplace = True, and it will be given a copy, whose changes are copied back."
)


class Gate(torch.autograd.Function):
    """Hands tensors on as they are, and lets a function see, and change, all their gradients at once."""

    @staticmethod
    def forward(
        ctx: Any, see: Callable[[Gradients], Gradients], way: Callable[[Tensor], Tensor], *given: Tensor
    ) -> Any:
        ctx.see = see
        ctx.set_materialize_grads(False)  # None stays None: nothing flowed.
        return tuple(way(tensor) for tensor in given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (None, None, *ctx.see(gradients))


class BackwardHooks:
    """The backward hooks of one module. It stands among the module's native hooks as long as there are any of them."""

    def __init__(self) -> None:
        self.before: OrderedDict[int, Hook] = OrderedDict()
        self.after: OrderedDict[int, Hook] = OrderedDict()
        # The calls that are running, by thread, the innermost last.
        self._running: dict[int, list[Passage]] = {}

    def add(self, which: str, key: int, hook: Hook, *, prepend: bool) -> None:
        """Put a hook in line, ``before`` or ``after`` the gradient passes the module."""
        line: OrderedDict[int, Hook] = getattr(self, which)
        line[key] = hook
        if prepend:
            line.move_to_end(key, last=False)

    def discard(self, module: nn.Module, which: str, key: int) -> None:
        """Take a hook out of line, and all of this out of the module with the last one."""
        getattr(self, which).pop(key, None)
        if not self.before and not self.after:
            for table in _tables(module):
                table.pop(KEY, None)

    def install(self, module: nn.Module) -> None:
        """Stand first and last in the module's calls."""
        pre_hooks, pre_kwargs, hooks, always = _tables(module)
        pre_hooks[KEY], hooks[KEY] = self.way_in, self.way_out
        pre_kwargs[KEY] = always[KEY] = True  # Called after an exception too, to forget the call.

    def way_in(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the inputs through a gate, and see to it that the output is met behind all other forward hooks."""
        passage = Passage(module, tuple(self.before.values()), tuple(self.after.values()))
        self._running.setdefault(current.token, []).append(passage)
        # PyTorch collects the forward hooks after forward has returned, so it still finds this one last.
        _tables(module)[2].move_to_end(KEY)
        return passage.let_in((args, kwargs)) if torch.is_grad_enabled() else None

    def way_out(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Let the output through, in the same call."""
        running = self._running.get(current.token)
        if not running:  # The hook came while the call was running.
            return None
        passage = running.pop()
        if not running:
            del self._running[current.token]
        return passage.let_out(output) if torch.is_grad_enabled() else None

    def __deepcopy__(self, memo: dict[int, Any]) -> BackwardHooks:
        """A copy of the module has the same hooks, and calls of its own."""
        copy = memo[id(self)] = BackwardHooks()
        copy.before.update(self.before)
        copy.after.update(self.after)
        return copy


def backward_hooks(module: nn.Module) -> BackwardHooks:
    """The module's line of backward hooks, made if there is none."""
    way_in: Any = forward_pre_hooks_of(module).get(KEY)
    if way_in is not None:
        return way_in.__self__  # type: ignore[no-any-return]
    manager = BackwardHooks()
    manager.install(module)
    return manager


def _tables(module: nn.Module) -> tuple[OrderedDict[Any, Any], ...]:
    """PyTorch's own tables of a module's hooks; its keys are integers, and ours is none."""
    names = (FORWARD_PRE, FORWARD_PRE_WITH_KWARGS, FORWARD, FORWARD_ALWAYS_CALLED)
    return tuple(module.__dict__[name] for name in names)


class Passage:
    """One call of a module: what came in, what went out, and the gradients on their way back.

    The graph holds it, so it holds no tensor any more once the call is over.
    """

    def __init__(self, module: nn.Module, before: tuple[Hook, ...], after: tuple[Hook, ...]) -> None:
        self._module, self._before, self._after = module, before, after
        self._since = next_operation_number()
        self._outgoing: Gradients = ()
        self._inputs = self._outputs = 0
        self._in_places: list[int] = []
        self._out_places: list[int] = []
        self._versions: list[int] = []
        self._shared: list[tuple[Counter, Any]] = []
        # What came in, and what the module got in its place, while the call runs.
        self._exchanged: list[tuple[Tensor, Tensor]] = []
        self._copies = False

    # -- forward ------------------------------------------------------------------------------------------------------

    def let_in(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """The arguments, with every tensor that requires a gradient behind a gate."""
        slots = [((0, *path), tensor) for path, tensor in _slots(given[0])]
        slots += [((1, *path), tensor) for path, tensor in tensors(given[1])]
        self._inputs = len(slots)
        wanted = _wanted(slots)
        if not self._after or not wanted:
            return None
        self._in_places = [place for place, _, _ in wanted]
        self._copies = model_changes_in_place(self._module.modules())
        # Detached inside the gate, a tensor keeps its memory and is no view: others may change it in place.
        passed = _gate(self._gradients_in, wanted, torch.clone if self._copies else torch.detach)
        self._exchanged = [(tensor, new) for (_, _, tensor), new in zip(wanted, passed, strict=True)]
        self._versions = [new._version for new in passed]
        new: Any = given
        for (_, path, _), tensor in zip(wanted, passed, strict=True):
            new = replace_at(new, path, tensor)
        return new

    def let_out(self, output: Any) -> Any:
        """The output, watched."""
        exchanged, self._exchanged = self._exchanged, []
        slots = _slots(output)
        wanted = _wanted(slots)
        self._outputs = len(slots)
        self._out_places = [place for place, _, _ in wanted]
        back = self._write_back(exchanged)
        if len(wanted) == 1:
            return self._watch_one(output, *wanted[0][1:], exchanged, back)
        return self._watch_many(output, wanted) if wanted else None

    def _write_back(self, exchanged: list[tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
        """Where the module changed our copy of an input in place, change that input likewise; gives those inputs."""
        back: dict[int, Tensor] = {}
        for (tensor, new), version in zip(exchanged, self._versions, strict=True):
            if new._version == version:
                continue
            if not self._copies:
                raise HookError(NO_SIGN.format(module=type(self._module).__name__))
            back[id(new)] = tensor.copy_(new)
        return back

    def _watch_one(self, output: Any, path: Path, tensor: Tensor, exchanged: Any, back: dict[int, Tensor]) -> Any:
        place = next((index for index, (_, new) in enumerate(exchanged) if new is tensor), None)
        if id(tensor) in back:
            own = back[id(tensor)]  # The caller's own tensor, as without us.
        elif place is not None:
            return replace_at(output, path, self._pass_on(exchanged[place][0], self._in_places[place]))
        else:
            own = own_alias(tensor) if is_older(tensor, self._since) else tensor
        hook_tensor(own, lambda gradient: self._gradients_out((gradient,))[0])
        return None if own is tensor else replace_at(output, path, own)

    def _pass_on(self, tensor: Tensor, place: int) -> Tensor:
        """An input is all that the module returns, as it was: its gradient comes by the output, not by the gate."""
        alias = own_alias(tensor)
        self._in_places, inputs = [], self._inputs

        def through(gradient: Tensor) -> Tensor | None:
            (outgoing,) = self._gradients_out((gradient,), call_after=False)
            incoming = tuple(outgoing if index == place else None for index in range(inputs))
            return self._call_after(incoming)[place]

        hook_tensor(alias, through)
        return alias

    def _watch_many(self, output: Any, wanted: list[tuple[int, Path, Tensor]]) -> Any:
        passed = _gate(self._gradients_out, wanted, torch.detach)
        for (_, path, tensor), new in zip(wanted, passed, strict=True):
            self._note_shared(tensor, new)
            output = replace_at(output, path, new)
        return output

    def _note_shared(self, tensor: Tensor, new: Tensor) -> None:
        """Remember where a tensor lies whose memory others may have too."""
        storage = storage_identity(tensor)
        place = (storage, tensor.storage_offset(), tensor.size(), tensor.stride(), is_older(tensor, self._since))
        self._shared.append((Counter(new), place))

    # -- backward -----------------------------------------------------------------------------------------------------

    def _gradients_out(self, gradients: Gradients, *, call_after: bool = True) -> Gradients:
        """The gradients of the outputs have come."""
        if any(counter.changed for counter, _ in self._shared) and _overlap([place for _, place in self._shared]):
            raise HookError(OVERLAP.format(module=type(self._module).__name__))
        whole: list[Tensor | None] = [None] * self._outputs
        for place, gradient in zip(self._out_places, gradients, strict=True):
            whole[place] = gradient
        outgoing = tuple(whole)
        for hook in self._before:
            new = _called(hook, self._module, outgoing)
            if new is not None:
                outgoing = _checked(new, len(outgoing), "grad_output", hook)
        self._outgoing = outgoing
        if call_after and not self._in_places:
            self._call_after((None,) * self._inputs)
        return tuple(outgoing[place] for place in self._out_places)

    def _gradients_in(self, gradients: Gradients) -> Gradients:
        """The gradients of the inputs have come, through this module alone."""
        whole: list[Tensor | None] = [None] * self._inputs
        for place, gradient in zip(self._in_places, gradients, strict=True):
            whole[place] = gradient
        incoming = self._call_after(tuple(whole))
        return tuple(incoming[place] for place in self._in_places)

    def _call_after(self, incoming: Gradients) -> Gradients:
        # A pass may come from inside the module, past its outputs.
        outgoing, self._outgoing = self._outgoing or (None,) * self._outputs, ()
        for hook in self._after:
            new = _called(hook, self._module, incoming, outgoing)
            if new is not None:
                incoming = _checked(new, len(incoming), "grad_input", hook)
        return incoming


def _called(hook: Hook, module: nn.Module, *gradients: Gradients) -> Any:
    try:
        return hook(module, *gradients)
    except Exception as error:
        error.add_note(f"in the backward hook {name_of(hook)} of a {type(module).__name__}")
        raise


def _gate(see: Callable[[Gradients], Gradients], wanted: list[Any], way: Callable[[Tensor], Tensor]) -> Any:
    return Gate.apply(see, way, *(tensor for _, _, tensor in wanted))  # type: ignore[no-untyped-call]


def _slots(value: Any) -> list[tuple[Path, Tensor | None]]:
    """One slot for each tensor, and an empty one for whatever else stands directly in a tuple, as PyTorch has it."""
    if not isinstance(value, tuple):
        return list(tensors(value))
    slots: list[tuple[Path, Tensor | None]] = []
    for index, part in enumerate(value):
        inside: list[tuple[Path, Tensor | None]] = [((index, *path), tensor) for path, tensor in tensors(part)]
        slots.extend(inside or [((index,), None)])
    return slots


def _wanted(slots: list[Any]) -> list[tuple[int, Path, Tensor]]:
    return [(place, path, t) for place, (path, t) in enumerate(slots) if t is not None and t.requires_grad]


def _overlap(places: list[Any]) -> bool:
    """Whether two outputs show the same memory, or one shows memory that is not the module's own."""
    if any(older for *_, older in places):
        return True
    marks: dict[int, Tensor] = {}
    for storage, offset, size, stride, _ in places:
        reach = 1 + offset + sum(step * (length - 1) for step, length in zip(stride, size, strict=True))
        known = marks.get(storage, torch.zeros(0, dtype=torch.bool))
        marks[storage] = torch.cat([known, torch.zeros(max(reach - len(known), 0), dtype=torch.bool)])
        mine = marks[storage].as_strided(size, stride, offset)
        if bool(mine.any()):
            return True
        mine.fill_(value=True)
    return False


def _checked(new: Any, length: int, what: str, hook: Hook) -> Gradients:
    gradients: Gradients = new if isinstance(new, tuple) else (new,)
    if len(gradients) != length:
        text = f"the backward hook {name_of(hook)} returned {len(gradients)} gradients for {what}"
        raise HookError(f"{text}, which has {length}")
    return gradients


def name_of(hook: Hook) -> str:
    """What to call a hook in an error."""
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)
