"""The server of recorded calls. It serves a call only if this cannot change the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._draw import Column, Drawn, Row, Table
from tenterhook._text import counted
from tenterhook._tree import map_tensors, tensors
from tenterhook.call_trace.digest import digest, version
from tenterhook.call_trace.module_state import OTHER_STATE
from tenterhook.call_trace.trace import (
    KeptStructure,
    TracedCall,
    TracedRun,
    alike,
    copied,
    differ,
    of_one_kind,
    same_content,
)
from tenterhook.compiled.serve_spec import GRADIENTS, UNLIKE
from tenterhook.engine.action import Guard
from tenterhook.replay.compiled_serving import CompiledServing
from tenterhook.sites.model_facts import facts
from tenterhook.sites.module import MISSING

__all__ = ["CallServer", "ServedCall"]


class ServedCall(Drawn):
    """The calls that a replay served or computed, with reasons. Printing it shows a table."""

    def __init__(self) -> None:
        self._served: Counter[str] = Counter()
        self._computed: dict[str, Counter[str]] = {}
        self.runs = 0

    def __len__(self) -> int:
        """Return the number of calls that were served."""
        return self._served.total()

    @property
    def calls(self) -> dict[str, int]:
        """Number of served calls by module."""
        return dict(self._served)

    @property
    def computed(self) -> dict[str, str]:
        """Reasons by module: why a call was computed, although nothing before it was edited."""
        return {path: reasons.most_common(1)[0][0] for path, reasons in self._computed.items()}

    def serve(self, path: str) -> None:
        self._served[path or ":return"] += 1

    def compute(self, path: str, why: str) -> None:
        self._computed.setdefault(path or ":return", Counter())[why] += 1

    def table(self) -> Table:
        """Return a table with one row per module and reason."""
        rows = [Row((path, str(count), "", "")) for path, count in self._served.items()]
        for path, reasons in self._computed.items():
            rows += [Row((path, "", str(count), why), style="dim") for why, count in reasons.items()]
        columns = (Column("module"), Column("served", right=True), Column("computed", right=True), Column("because"))
        computed = sum(reasons.total() for reasons in self._computed.values())
        served = f"{counted(self.runs, 'run')}, {counted(len(self), 'call')} served"
        title = f"replay: {served}, {computed} computed before the first edit"
        return Table(title, columns, tuple(rows))


class CallServer(Guard):
    """The guard that serves the calls of each run.

    With ``times``, the current run contains every example of the recorded run that many times, case after case.
    """

    def __init__(self, served: ServedCall, model: nn.Module, *, gradients: bool) -> None:
        self.served, self._model, self._gradients = served, model, gradients
        self.times = 1
        # Comparisons that are assumed to be equal until they are read later, or None to read them at once.
        self.doubts: list[Tensor] | None = None
        self.run: TracedRun | None = None
        self.minds_gradients = False
        self._copy = facts(model).in_place
        self.ahead = CompiledServing(self, model, copies=self._copy)
        self._counts: dict[nn.Module, int] = {}
        # Tensors of the current run that are known to equal a recorded one: the tensor, its version, the recorded one.
        # The key is the address and layout of the memory, so that another view of the same memory is known too.
        self._known: dict[Any, tuple[Tensor, int, Tensor]] = {}
        # Recorded tensors repeated for several cases: the result, its version, and the number of cases.
        self._read_by: dict[Any, list[Tensor]] = {}
        self._wide: dict[Tensor, tuple[Tensor, int, tuple[int, int]]] = {}

    waits_for = ("cuda",)  # Devices on which reading a result takes long.

    def begin(self, run: TracedRun | None) -> None:
        """Start a run of the whole model, or end it if ``run`` is None."""
        self.run = run
        self._changed = run.dependencies.changed() if run is not None else set()
        self._counts.clear()
        self._known.clear()
        self.minds_gradients = torch.is_grad_enabled() and not self._gradients

    def compare_bits(self, modules: Iterable[nn.Module]) -> None:
        """Compare the bits of the tensors that calls of some modules may read with those of the recorded run."""
        run, key = self.run, frozenset(modules)
        if run is None or not run.digests:
            return
        tensors = self._read_by.get((run, key))
        if tensors is None:
            readers = {tensor: run.dependencies.readers_of(tensor) for tensor in run.digests}
            tensors = self._read_by[run, key] = [tensor for tensor in run.digests if readers[tensor] & key]
        for tensor, now in zip(tensors, digest(tensors), strict=True):
            if now != run.digests[tensor]:
                self._changed |= run.dependencies.readers_of(tensor)

    def forget(self) -> None:
        """Free the tensors that were repeated for several cases."""
        self._wide.clear()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.run is None:
            return MISSING
        index = self._counts.get(module, 0)
        self._counts[module] = index + 1
        call = self.run.calls.get((module, index))
        if call is None:
            return MISSING
        why = call.why or self.obstacle(call, (args, kwargs))
        if why:
            self.served.compute(call.path, why)
            return MISSING
        assert call.gave is not None  # noqa: S101  A call that can be served has a recorded output.
        self.served.serve(call.path)
        return self._give(call.gave)

    def after(self, module: nn.Module, value: Any) -> None:
        """Do nothing."""

    # -- conditions
    # -----------------------------------------------------------------------------------------------------

    def obstacle(self, call: TracedCall, live: tuple[Any, Any] | None = None) -> str:
        """Return the reason against serving a call, or an empty string.

        Without ``live``, the arguments of the current call, check only what is known before the call.
        """
        run, given, gave = self.run, call.given, call.gave
        assert run is not None and given is not None and gave is not None  # noqa: S101, PT018
        together = run.together(call.module)
        if self.minds_gradients and (together.needs_gradient or _require_gradients(live)):
            return GRADIENTS
        why = together.obstacle()
        if why or call.module in self._changed:
            return why or OTHER_STATE
        if gave.changed or given.changed:
            return "its recorded values were changed in place"
        if live is not None and not self.matches(given, live):
            return UNLIKE
        return ""

    def matches(self, given: KeptStructure, live: Any) -> bool:
        """Return whether the arguments of a call equal the recorded ones."""
        return alike(given.value, live, self._same)

    def _same(self, kept: Tensor, live: Tensor) -> bool:
        where = _where(live)
        known = self._known.get(where)
        if known is not None and known[1] == version(live) and known[2] is kept:
            return True
        same = self._compare(kept, live)
        if same:
            self._known[where] = (live, version(live), kept)
        return same

    def _compare(self, kept: Tensor, live: Tensor) -> bool:
        if self.times > 1 and kept.dim() and live.shape == (kept.shape[0] * self.times, *kept.shape[1:]):
            live = live.unflatten(0, (self.times, kept.shape[0]))
            kept = kept.unsqueeze(0).expand(live.shape)
        elif self.times == 1 and kept.stride() != live.stride():
            return False
        if not of_one_kind(kept, live):
            return False
        if self.doubts is not None and live.device.type in self.waits_for:
            self.doubts.append(differ(kept, live))
            return True
        return same_content(kept, live)

    # -- values
    # ---------------------------------------------------------------------------------------------------------

    def _give(self, gave: KeptStructure) -> Any:
        made: dict[int, Tensor] = {}

        def one(kept: Tensor) -> Tensor:
            live = made.get(id(kept))
            if live is None:
                live = made[id(kept)] = self.repeated(kept) if self.times > 1 else copied(kept)
                self._known[_where(live)] = (live, version(live), kept)
            return live

        return map_tensors(one, gave.value)

    def repeated(self, kept: Tensor) -> Tensor:
        """Return a recorded tensor repeated for several cases, if its first dimension is the recorded batch."""
        if not kept.dim() or kept.shape[0] != self.batch:
            return copied(kept)
        if self._copy or torch.is_inference_mode_enabled():
            return self._repeat(kept)
        made = self._wide.get(kept)
        if made is None or made[1] != version(made[0]) or made[2] != (self.times, self.batch):
            wide = self._repeat(kept)
            made = self._wide[kept] = (wide, version(wide), (self.times, self.batch))
        return made[0]

    def _repeat(self, kept: Tensor) -> Tensor:
        wide = kept.unsqueeze(0).expand(self.times, *kept.shape)
        if kept.dim() == 4 and not kept.is_contiguous() and kept.is_contiguous(memory_format=torch.channels_last):  # noqa: PLR2004
            return wide.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        return wide.reshape(self.times * kept.shape[0], *kept.shape[1:]) if self.batch > 1 else wide[:, 0].contiguous()

    batch = 1


def _where(tensor: Tensor) -> Any:
    """Return a key for the memory and layout of a tensor.

    Tensors with equal keys show the same memory in the same way.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _require_gradients(given: Any) -> bool:
    return any(tensor.requires_grad for _, tensor in tensors(given))
