"""Statistics of parameters, of their gradients, and of the update in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from tenterhook.address import Point, Site
from tenterhook.address.walk import first_names
from tenterhook.statistics.measure import COLUMNS, Wanted, whole
from tenterhook.statistics.snapshot import Snapshot
from tenterhook.statistics.tensor_signature import are_plain, plain
from tenterhook.watch.history import Kind
from tenterhook.watch.locate_nonfinite import NonFiniteReport
from tenterhook.watch.measured_batch import Explain, MeasuredBatch, MeasureRequest, RowLayout, measured

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tenterhook.watch.history import History
    from tenterhook.watch.results import WatchOptions

__all__ = ["Parameters"]

_BOTH: tuple[Kind, ...] = ("parameters", "updates")


class Parameters:
    """The parameters of the watched modules with all their submodules, and parameters that are named themselves."""

    def __init__(
        self,
        model: nn.Module,
        points: Sequence[Point],
        history: History,
        options: WatchOptions,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._history, self._options, self._optimizers = history, options, optimizers
        # Parameters are many and change slowly, so a smaller sample is enough.
        self._limit = None if options.sample is None else max(1, options.sample // 8)
        named = _named(model, points)
        self.names = set(named)
        self.named = named
        self._labels = list(named)
        self._parameters = list(named.values())
        self.matrices = [name for name, parameter in named.items() if parameter.dim() > 1]
        self.tied = _used_twice(model)
        self._tensors: list[Tensor] = []
        self._where: list[int] = []
        self._snapshot: Snapshot | None = None
        self._taken = self.closes = False
        self._asked: list[Optimizer] = []
        self._measured: set[int] = set()  # Parameters whose gradients were measured in the current step.
        self._rows: dict[Kind, list[int]] = {}
        self._layouts: dict[tuple[Kind, Sequence[int]], RowLayout] = {}

    @property
    def tensors(self) -> list[nn.Parameter]:
        """The parameters."""
        return self._parameters

    def begin(self, *, at_once: bool) -> None:
        """Begin a step. With ``at_once``, save the values now, because no optimizer will announce the update."""
        self._taken = self.closes = False
        self._asked = []
        self._measured.clear()
        if at_once and self._history.slow and "updates" in self._options.of:
            self._take()

    closes: bool
    """True if the optimizer has a closure, so that the gradients of the step are computed later"""

    def before(self, optimizer: Optimizer, *, closes: bool) -> list[MeasureRequest]:
        """Return requests to measure gradients before an optimizer steps. Only its first call in a step counts."""
        if optimizer in self._asked:
            return []
        self._asked.append(optimizer)
        if len(self._asked) == 1 and self._history.slow and "updates" in self._options.of:
            self._take()
        self.closes = closes
        return [] if closes else self.gradients(self._part(optimizer))

    def asked(self, optimizer: Optimizer) -> bool:
        """Return whether :meth:`before` was called for this optimizer in this step."""
        return optimizer in self._asked

    def _part(self, optimizer: Optimizer) -> Sequence[int] | None:
        """Return the parameters of an optimizer if there are several. The first one also gets those of no optimizer."""
        if len(self._optimizers) <= 1:
            return None
        each = {id(one): {id(p) for group in one.param_groups for p in group["params"]} for one in self._optimizers}
        own, every = each[id(optimizer)], set().union(*each.values())
        first = len(self._asked) == 1
        found = enumerate(self._parameters)
        return tuple(i for i, parameter in found if id(parameter) in own or (first and id(parameter) not in every))

    def gradients(self, part: Sequence[int] | None = None) -> list[MeasureRequest]:
        """Return requests to measure the gradients accumulated so far, of all parameters or a part of them."""
        if "gradients" not in self._options.of:
            return []
        which: Sequence[int] = range(len(self._parameters)) if part is None else part
        found: list[Any] = [self._parameters[i].grad for i in which]
        if not set(map(type, found)) <= {Tensor}:  # Some are None or not plain tensors.
            which = tuple(i for i, gradient in zip(which, found, strict=True) if gradient is not None)
            found = [gradient for gradient in found if gradient is not None]
        if not found:
            return []
        # After an earlier backward pass of the same step, the gradient is the sum of both.
        again = not self._measured.isdisjoint(which)
        self._measured.update(which)
        return [self._request("gradients", which, found)._replace(replaces=again)]

    def after(self) -> list[MeasuredBatch]:
        """Measure parameters and updates at the end of a step."""
        # A closure may have changed the gradients after its backward pass.
        requests = self.gradients() if self.closes else []
        if self._history.slow:
            self._follow()
        if self._taken and self._snapshot is not None:
            return [*measured(requests, self._history), *self._moved(self._snapshot)]
        if self._tensors and self._history.slow and "parameters" in self._options.of:
            requests.append(self._request("parameters", range(len(self._tensors)), self._tensors))
        return measured(requests, self._history)

    def _moved(self, snapshot: Snapshot) -> list[MeasuredBatch]:
        self._taken = False
        rows, ways = self._row_list("parameters"), self._row_list("updates")
        every = range(len(self._tensors))
        # The update itself is not kept. If it is not finite, the number of bad elements is not known.
        left = {"parameters": self._tensors, "updates": None}
        return [
            MeasuredBatch(self._layout(kind, every), found, left[kind], self._explain(kind, every, self._tensors))
            for kind, found in zip(_BOTH, snapshot.moved(self._history.sketch, rows, ways), strict=True)
            if kind in self._options.of
        ]

    def _follow(self) -> None:
        """Check the storage of the parameters, which ``.data`` or ``model.to`` may have replaced."""
        where = [parameter.data_ptr() if type(parameter) is nn.Parameter else 0 for parameter in self._parameters]
        if where == self._where and all(where):
            return
        found = [plain(parameter.detach()) for parameter in self._parameters]
        if any(tensor is None for tensor in found):  # They have no data any more.
            return
        self._where, self._tensors = where, cast("list[Tensor]", found)
        if self._snapshot is not None and not self._snapshot.follow(self._tensors):
            self._snapshot, self._taken = None, False

    def release(self) -> None:
        """Release all tensors."""
        self._snapshot, self._tensors, self._parameters, self.named = None, [], [], {}

    def _take(self) -> None:
        self._follow()
        if self._snapshot is None:
            self._snapshot = Snapshot(self._tensors, self._limit, self._history.workspace)
        self._snapshot.take()
        self._taken = True

    def _row_list(self, kind: Kind) -> list[int]:
        if kind not in self._rows:
            self._rows[kind] = [self._history.row(kind, label) for label in self._labels]
        return self._rows[kind]

    def _request(self, kind: Kind, which: Sequence[int], found: Sequence[Tensor]) -> MeasureRequest:
        layout = self._layout(kind, which)
        plan = layout.plan if layout.plan is not None and layout.plan.fits(found) else None
        if plan is None and not are_plain(found):
            real = [(i, plain(tensor)) for i, tensor in zip(which, found, strict=True)]
            which = tuple(i for i, tensor in real if tensor is not None)
            found, layout = [tensor for _, tensor in real if tensor is not None], self._layout(kind, which)
        in_a_row = plan is not None and plan.like.in_a_row
        quick = kind == "gradients"
        wanted = Wanted(found, self._limit, 0, layout.first, kind, plan=plan, quick=quick, in_a_row=in_a_row)
        return MeasureRequest(layout, wanted, self._explain(kind, which, found))

    def _layout(self, kind: Kind, which: Sequence[int]) -> RowLayout:
        found = self._layouts.get((kind, which))
        if found is None:
            rows = self._row_list(kind)
            found = self._layouts[kind, which] = RowLayout([rows[i] for i in which])
        return found

    def _explain(self, kind: Kind, which: Sequence[int], tensors: Sequence[Tensor]) -> Explain:
        labels = self._labels

        def explain(bad: list[int], _late: bool) -> NonFiniteReport:  # noqa: FBT001 - called by MeasuredBatch
            first = bad[0]
            numbers = dict(zip(COLUMNS, whole(tensors[first]).tolist(), strict=True))
            report = NonFiniteReport(-1, kind, labels[which[first]], 0, numbers)
            if kind != "gradients":
                report.reason = "All values and gradients of this step were finite, but the update was not."
            return report

        return explain


def _used_twice(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that several modules share."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {each for each, count in owners.items() if count > 1}


def _named(model: nn.Module, points: Sequence[Point]) -> dict[str, nn.Parameter]:
    wanted = {id(point.tensor) for point in points if point.site is Site.PARAMETER}
    roots = {id(point.module) for point in points if point.site is Site.RETURN}
    for module in model.modules():
        if id(module) in roots:
            wanted.update(id(tensor) for tensor in module.parameters())
    names = first_names(model)  # The names in the unwrapped model.
    every = ((names.get(id(tensor), name), tensor) for name, tensor in model.named_parameters())
    usable = ((name, tensor) for name, tensor in every if id(tensor) in wanted)
    return {name: tensor for name, tensor in usable if plain(tensor) is not None}
