"""A session: actions that are installed in a model all together or not at all, and all removed at the end."""

from __future__ import annotations

import threading
import warnings
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from torch import nn

from tenterhook._text import printable
from tenterhook.address.match import Point, Site
from tenterhook.address.walk import Looked, Structure, find, last_structure, structure, walk
from tenterhook.engine.action import Binding, Context
from tenterhook.engine.compile_counts import Compiled
from tenterhook.engine.compiled_support import compiled_support
from tenterhook.engine.install import attach_all, detach, locked
from tenterhook.engine.module_actions import ModuleActions
from tenterhook.engine.never_reached import never_reached
from tenterhook.engine.runs import Numbering, RunNumbers, RunStart, check_numbering, listen, stop_listening
from tenterhook.engine.shared_forward import SharedForwards
from tenterhook.engine.with_block import BlockEnd
from tenterhook.errors import (
    ClosedSession,
    ModelChanged,
    SessionError,
    Stopped,
    TenterhookWarning,
    UnsupportedModel,
)
from tenterhook.pytorch.checkpointing import refuse_checkpoints
from tenterhook.pytorch.distributed import require_fsdp
from tenterhook.pytorch.dynamo import has_compiled_anything
from tenterhook.pytorch.module_calls import GLOBAL_FORWARD_HOOKS, forward_hooks_of
from tenterhook.pytorch.support import require, works
from tenterhook.pytorch.wrappers import unwrapped, wrappers_of
from tenterhook.sites.fused_layers import FUSED, unfused
from tenterhook.sites.model_facts import facts
from tenterhook.sites.parameter import Exchange, Swap, is_offloaded, own_update
from tenterhook.sites.readers import Readers, refuse_outside_owners
from tenterhook.sites.tensor_wrappers import is_spread
from tenterhook.sites.threads import current

__all__ = ["Session", "open_here"]

REPLACED = (
    "the forward of {path!r} was replaced while a session was open. The replacement stays in place. It may still call "
    "the forward of tenterhook, which now does nothing. Close the session before you replace a forward, or replace it "
    "before the session starts."
)
OFFLOADED = (
    "{address!r} is offloaded: it is only materialised during a call, so nothing exists to record, edit or watch "
    "here. Use the outputs and arguments of its module, or a model that is not offloaded."
)
REPLICAS = (
    "nn.DataParallel runs copies of the model in other threads, and a session acts in one thread only. Open the "
    "session on the inner module and call that module, or use DistributedDataParallel."
)


NEEDED = ("module calls", "backward passes", "tracing", "transforms of torch.func", "structured values")


RELEASED: dict[str, Any] = {
    "_action_sets": MappingProxyType({}), "bindings": (), "required": (), "entries": MappingProxyType({}), "_swaps": (),
    "graph_outputs": None, "_shared_forwards": None, "_readers": None, "_looked": None,
}  # fmt: skip
"""what a session that has ended refers to"""


class _Local(threading.local):
    def __init__(self) -> None:
        self.open: list[Session] = []


_local = _Local()


def open_here() -> list[Session]:
    """Return the sessions that are open in this thread, on any model, in the order of opening."""
    return list(_local.open)


class Session:
    """Actions at points, installed until the session is closed.

    ``required`` holds groups of bindings. In each group at least one binding must be reached before the session ends.
    """

    verb = "session"
    joins_late = False
    """whether the session can join compiled code after it has started"""
    needs: tuple[str, ...] = ()
    """The features of PyTorch that this kind of session needs, besides those that all sessions need."""

    # Class attributes, because a session that is opened for one call uses few of them.
    done = False
    stopped = False
    inner: Any = None
    """the model inside all wrappers, once the session has started"""
    tape: Any = None
    waits = False
    """whether the session waits for the compiler, in a process that has compiled other code"""
    depth = 0
    """the number of `with` blocks around"""
    owner = 0
    """the thread that has started the session"""
    graph_outputs: Any = None
    """where compiled graphs store what they record; see tenterhook.compiled"""
    plan_key: tuple[Any, ...] = ()
    _state = "new"
    _compiles = False
    """True if compiled code may run this model"""
    _fused: tuple[str, ...] = ()
    """the paths of layers whose fast path bypasses their children"""
    _shared_forwards: SharedForwards | None = None
    _readers: Readers | None = None
    _runs: RunNumbers | None = None
    _swaps: tuple[Exchange, ...] = ()
    _neighbours: Any = ()
    """the list of the sessions that are open in the thread that has started this one"""
    _planned: Structure | None = None
    """the model's structure when its points were found, if known"""
    _looked: Looked | None = None
    """the model's structure at the start, to compare at the end"""
    _compile_counts = Compiled()
    _rest: Self | None = None

    def __init__(self, model: nn.Module, bindings: list[Binding], required: list[list[Binding]]) -> None:
        self.model, self.bindings, self.required = model, bindings, required
        self._action_sets: dict[nn.Module, ModuleActions] = {}

    @cached_property
    def entries(self) -> dict[nn.Module, str]:
        """The modules at which compiled graphs begin; see tenterhook.compiled."""
        return {}

    # -- in -----------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Install everything, or raise and install nothing."""
        if self._state != "new":
            raise self._not_new()
        self.owner = current.token
        try:
            require(*NEEDED, *self.needs)
            compiled = has_compiled_anything()
            if compiled:
                self._compiles = compiled_support().runs(self.model)
            self._fused = facts(self.model).fused
            self._plan()
            self._check_torch()
            if compiled:
                self._prepare_compiled()
            planned = len(self._action_sets)
            if self._shared_forwards is not None:
                self._shared_forwards.install()
            if self._action_sets:
                attach_all(self._action_sets.values())
                if self.waits and len(self._action_sets) > planned:  # Another session, or an own forward, is there.
                    compiled_support().stop_waiting(self)
                    self.join_compiled()
            if self._runs is not None:
                listen(self.inner, self._runs)
            self.on_start()
            self._state = "open"
            # The list of the thread that starts the session; another thread may close it.
            self._neighbours = around = _local.open
            around.append(self)
        except BaseException:
            self._undo()
            self._release()
            raise
        return self

    def _prepare_compiled(self) -> None:
        """Prepare for compiled code, of this model or of another one."""
        if self._compiles or not self._can_wait():
            compiled_support().begin(self)
        else:
            self.waits = True  # Set this first, so that an interrupt finds what to undo.
            compiled_support().wait(self)

    def _not_new(self) -> SessionError:
        if self._state == "open":
            return SessionError(f"this {self.verb} session is open already; open a second one with th.{self.verb}(...)")
        return ClosedSession(f"this {self.verb} session is closed; open a new one with th.{self.verb}(...)")

    def _plan(self) -> None:
        self.inner = unwrapped(self.model)
        shared = self._shared_forwards = self.make_shared_forwards()
        if self.bindings and (shared is None or not shared.serves_bindings):
            self._plan_bindings()
        if self._fused:
            self._leave_fast_paths()
        if self._looked is None:
            self._check_model()
        if self.inner is not self.model:
            for wrapper in wrappers_of(self.model):
                if isinstance(wrapper, nn.DataParallel) and len(wrapper.device_ids) > 1:
                    raise UnsupportedModel(REPLICAS)

    def _plan_bindings(self) -> None:
        for binding in self.bindings:
            point = binding.point
            if point.site is Site.PARAMETER:
                self._plan_parameter(binding)
            else:
                self._actions_of(point.module, point.path).add(binding)

    def _check_model(self) -> None:
        """Raise :class:`ModelChanged` if modules were replaced since the session was made."""
        shared, there = self._shared_forwards, None
        if not self.is_explicit:
            known, self._looked, _ = structure(self.model)
            if known is self._planned:
                return
            there = {id(module) for _, module in walk(self.model, as_built=True)[0]}
        for module in (*self._action_sets, *(shared.modules if shared is not None else ())):
            path = shared.path_of(module) if shared and module in shared.modules else self._action_sets[module].path
            if find(self.model, path) is not unwrapped(module) if there is None else id(module) not in there:
                message = f"the module {path!r} was replaced or removed after this session was made"
                raise ModelChanged(f"{message}; make the session again with th.{self.verb}(...)")

    def _check_torch(self) -> None:
        """Raise if this release of PyTorch lacks something that only this model needs."""
        if not works("hooks of other libraries"):
            shared = self._shared_forwards.modules if self._shared_forwards is not None else ()
            modules = [*self._action_sets, *shared]
            if GLOBAL_FORWARD_HOOKS or any(forward_hooks_of(module) for module in modules):
                require("hooks of other libraries")
        if self.bindings and any(binding.action.again for binding in self.bindings):
            refuse_checkpoints(self.model)
        if "stopping a run" in self.needs:
            require_fsdp(self.model)

    @property
    def action_sets(self) -> dict[nn.Module, ModuleActions]:
        """The actions of the session at each module."""
        if self._shared_forwards is not None:
            self._shared_forwards.hand_over_all()
        return self._action_sets

    def _actions_of(self, module: nn.Module, path: str) -> ModuleActions:
        actions = self._action_sets.get(module)
        if actions is None:
            actions = self._action_sets[module] = ModuleActions(self, module, path)
            if self._shared_forwards is not None:
                self._shared_forwards.hand_over(module)
        return actions

    def _plan_parameter(self, binding: Binding) -> None:
        """Plan the swap of an edited parameter around every call of the modules that can read it."""
        point, action = binding.point, binding.action
        if is_offloaded(point.module, point.tensor):
            raise UnsupportedModel(OFFLOADED.format(address=point.address))
        if action.observes or action.install is not None or point.tensor is None:
            return
        context = Context(point.address, 0, point.module, self)
        readers = self._readers = self._readers or Readers(self.model)
        name = str(point.name)
        # FSDP2 gathers a parameter for the calls of its owner; in outer calls, the parameter is not the one that is
        # used.
        spread = is_spread(point.tensor)
        if isinstance(point.module, nn.RNNBase):
            require("parameters of recurrent layers")
        if not spread:
            readers.check(point.tensor, point.address)
            refuse_outside_owners(readers, point.module, name, point.address)
        swap = Swap(readers, point.tensor, lambda tensor: action(tensor, context))
        swap.binding = binding
        self._swaps += (swap,)
        reaching = {id(point.module)} if spread else readers.reaching(point.tensor)
        for path, module in walk(self.model)[0]:
            if id(module) in reaching:
                actions = self._actions_of(module, path)
                actions.swaps += (swap, *own_update(swap, module))
                actions.again = True
                actions.before_hooks = actions.before_hooks or not spread  # FSDP gathers it in a pre-hook.

    def _leave_fast_paths(self) -> None:
        """Make fused layers call their children, if a point is inside them."""
        for path in self._fused:
            layer = find(self.model, path)
            if isinstance(layer, FUSED) and self._wants_inside(path, layer):
                exchange = unfused(layer)
                self._swaps += (exchange,)
                self._actions_of(layer, path).swaps += (exchange,)

    def _wants_inside(self, path: str, layer: nn.Module) -> bool:
        inside = f"{path}." if path else ""
        for actions in self._action_sets.values():
            if actions.module is layer or not actions.path.startswith(inside):
                continue
            # On its fast path an encoder still calls its layers, but not the modules inside them.
            if not isinstance(layer, nn.TransformerEncoder) or not isinstance(
                actions.module, nn.TransformerEncoderLayer
            ):
                return True
        return False

    def needs_action_sets(self) -> bool:
        """Return whether every module needs its own actions.

        Compiled code, and fused layers that may bypass their children, must know all points before the run. Another
        session that waits for the compiler gets them when the compiler starts, see :meth:`join_compiled`.
        """
        return self._compiles or bool(self._fused)

    def _can_wait(self) -> bool:
        """Return whether the session can join compiled code in the middle of a run."""
        return self.joins_late and all(actions.can_join_late for actions in self._action_sets.values())

    def join_compiled(self) -> None:
        """Give every module its own actions and let them be traced: the compiler is about to trace this model."""
        with locked:
            action_sets = self.action_sets
            if not self.bindings:
                self.bindings = [each for found in action_sets.values() for each in (*found.looks_out, *found.inner)]
            self._compiles, self.waits = True, False
            compiled_support().join(self)
            attach_all(action_sets.values())
            for actions in action_sets.values():
                if actions.patch is not None:
                    actions.patch.refresh()

    def make_shared_forwards(self) -> SharedForwards | None:
        """Return the modules that a shared forward can serve, or None. A verb can override this."""

    def found_now(self) -> None:
        """Remember the structure in which the points were found, so that the start need not look for each of them."""
        self._planned = last_structure(self.model)

    def number_by(self, numbering: Numbering) -> None:
        """Choose what the call number of an address counts: the calls in the session, or in each run."""
        check_numbering(numbering)
        if numbering == "run":
            self._runs = RunNumbers()
            whole = Point(":return", Site.RETURN, self.model, "", explicit=True)
            self.bindings.append(Binding(whole, RunStart(self._runs)))

    def is_meant(self, binding: Binding, call: int) -> bool:
        """Return whether a binding acts in a call, whose number in the session is given."""
        return binding.point.has_call(call if self._runs is None else self._runs.number(binding, call))

    @property
    def is_explicit(self) -> bool:
        """True if every point was named directly, without a pattern."""
        return all(binding.point.explicit for binding in self.bindings)

    def has_calls(self) -> bool:
        """Return whether the session has seen any call."""
        shared = self._shared_forwards
        return (shared is not None and shared.has_calls()) or any(each.calls for each in self._action_sets.values())

    def calls_of(self, module: nn.Module) -> int:
        """Return the number of calls of a module that the session has seen."""
        actions, shared = self._action_sets.get(module), self._shared_forwards
        return max(actions.calls if actions is not None else 0, shared.calls_of(module) if shared is not None else 0)

    def on_start(self) -> None:
        """Install more. A verb can override this; an error in it undoes the start."""

    # -- out ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove everything, and raise if a required point was never reached. Closing again does nothing."""
        if self._state == "open":
            replaced = self._undo()
            try:
                if replaced:
                    self._say_what_was_replaced(replaced)
                self._say_what_was_missed()
            finally:
                self._release()
        self._state = "closed"

    def _release(self) -> None:
        """Drop the references to this session, so that it and its tape are freed without the garbage collector."""
        self.__dict__.update(RELEASED)

    def _undo(self) -> list[str]:
        """Remove everything. Return the paths of modules whose forward other code has replaced."""
        around, shared = self._neighbours, self._shared_forwards
        if self in around:
            around.remove(self)
        replaced = shared.remove() if shared is not None else []
        try:
            if self._action_sets:
                self._detach_all(replaced)
        finally:
            for swap in reversed(self._swaps):  # In case a call was interrupted while it swapped or restored them.
                swap.put_back()
            self.on_close()
            if self._runs is not None:
                stop_listening(self.inner, self._runs)
        if self.waits:
            compiled_support().stop_waiting(self)
            self.waits = False
        if self.graph_outputs is not None:
            self._compile_counts = compiled_support().end(self)
        self._state = "closed"
        return replaced

    def _detach_all(self, replaced: list[str]) -> None:
        # Another thread may be building a forward for all actions of a module; it must not see some of them half
        # removed.
        with locked:
            for actions in reversed(self._action_sets.values()):
                actions.rest()
                if not detach(actions):
                    replaced.append(actions.path or ":return")

    def on_close(self) -> None:
        """Remove more. A verb can override this."""

    def _say_what_was_replaced(self, paths: list[str]) -> None:
        # Warn last: a warning may be turned into an error, and everything must be removed by then.
        for path in paths:
            warnings.warn(REPLACED.format(path=path), TenterhookWarning, stacklevel=4)

    def _say_what_was_missed(self) -> None:
        if self.graph_outputs is not None and self.graph_outputs.error is not None:
            raise self.graph_outputs.error
        if self._looked is not None and not self._looked.is_unchanged:
            text = (
                f"{type(self.model).__name__} gained or lost modules while a {self.verb} session with a pattern was "
                "open on it: new modules were not part of it, and lost ones may have been missed."
            )
            warnings.warn(text, TenterhookWarning, stacklevel=4)
        missed = self.missed()
        if missed:
            raise never_reached(self, missed)

    def missed(self) -> list[list[Binding]]:
        """Return the required groups of which no binding was reached."""
        return [group for group in self.required if not any(binding.action.reached for binding in group)]

    # -- as a context manager -----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.depth += 1  # Increment first: the end of the block reads it if an interrupt comes.
        if self.depth == 1:
            try:
                self.start()
            except BaseException:
                self.drop()
                self.depth = 0
                raise
        return self

    __exit__ = BlockEnd()

    def leave(self, error: BaseException | None) -> bool:
        """Leave a ``with`` block. Return whether its error was this session's own stop."""
        if self.depth > 1:
            self.depth -= 1
            return False
        mine = isinstance(error, Stopped) and error.args[0] is self
        if error is None or mine:
            self.stopped = mine
            self.close()
        else:
            self.on_error(error)
            named = compiled_support().explained(self, error)
            replaced = self._undo()
            self._release()
            self._say_what_was_replaced(replaced)
            if named is not None:
                raise named from error
        self.depth = 0
        return mine

    def on_error(self, error: BaseException) -> None:
        """Note an error that leaves the `with` block, before anything is removed. A verb can override this."""

    def drop(self) -> None:
        """Remove everything that is still installed, without warnings. This is for an interrupt at the start or end."""
        try:
            self._undo()
        except BaseException:  # noqa: BLE001  A second interrupt. Steps that are done are not repeated.
            self._undo()
        self._release()

    # -- asked by actions ---------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True while the session is open."""
        return self._state == "open"

    @property
    def compiled(self) -> Compiled:
        """Counts of what torch.compile did while the session was open: calls, graphs, breaks and recompilations."""
        return compiled_support().compile_counts(self) if self.is_open else self._compile_counts

    def without_tape(self) -> Self:
        """Return a stand-in for this closed session, without its tape, for recomputations of calls that ran in it."""
        if self.tape is None:
            return self
        if self._rest is None:
            self._rest = rest = type(self).__new__(type(self))
            Session.__init__(rest, self.model, [], [])
            rest.owner, rest.done, rest.stopped = self.owner, self.done, self.stopped
            rest._runs, rest._state = self._runs, "closed"  # noqa: SLF001 - of the same class
        return self._rest

    def nearest_tape(self) -> Any:
        """Return the tape of the innermost recording session that is open on the same model in this thread, or None."""
        around = reversed(_local.open)
        tapes = (each.tape for each in around if each.tape is not None and each.inner is self.inner)
        return next(tapes, None)

    def __repr__(self) -> str:
        return printable(f"<{self._state} {self.verb} session on a {type(self.model).__name__}>")
