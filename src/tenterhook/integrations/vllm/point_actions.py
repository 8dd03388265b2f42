"""What happens at one point of a worker's model: edits of some requests, then recordings of some requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tenterhook.compiled.engine_api  # noqa: F401  # registers the support for compiled models
from tenterhook._tree import map_tensors, tensors
from tenterhook.address import Point
from tenterhook.engine.action import Action, Binding, Context
from tenterhook.engine.session import Session
from tenterhook.integrations.vllm.served_points import ValueLayout, without_batch
from tenterhook.sites.threads import current

if TYPE_CHECKING:
    from tenterhook.integrations.vllm.row_edits import RowEdit
    from tenterhook.integrations.vllm.runner_rows import RequestRows
    from tenterhook.integrations.vllm.worker_state import WorkerState

__all__ = ["PointActions"]


class PointActions(Action):
    """The edits and recordings of an engine at one point. It is installed as an edit of a session."""

    observes = False
    reached = True

    def __init__(self, state: WorkerState, point: Point) -> None:
        self.state, self.point, self.address = state, point, str(point)
        self.layout: ValueLayout | None = None
        self.recordings: list[str] = []
        self._session: Session | None = None

    # -- installing ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Install it in the model, for the current thread."""
        session = self._session
        if self.state.declared or (session is not None and session.owner == current.token):
            return
        self.close()
        self._session = Session(self.state.model, [Binding(self.point, self)], []).start()

    def close(self) -> None:
        """Remove it from the model."""
        if self._session is not None:
            self._session.close()
            self._session = None

    # -- in the model -------------------------------------------------------------------------------------------------

    def __call__(self, value: Any, context: Context) -> Any:  # noqa: ARG002
        if self.state.trial is not None:
            return self.state.trial.see(self.address, value)
        rows = self.state.rows_now()
        if not rows or self.layout is None:
            return value
        given = without_batch(value) if self.layout.has_batch else value
        if self.layout.is_first:
            acted = (self._acted(given[0], rows), *given[1:])
        else:
            acted = self._acted(given, rows)
            if acted is given:
                return value
        return map_tensors(lambda tensor: tensor[None], acted) if self.layout.has_batch else acted

    def in_place(self, value: Any) -> None:
        """Act on a value of compiled code, whose tensors are changed in place."""
        if self.state.trial is not None:
            new = self.state.trial.see(self.address, value)
            for (_, tensor), (_, changed) in zip(tensors(value), tensors(new), strict=True) if new is not value else ():
                tensor.copy_(changed)
        elif self.layout is not None and (rows := self.state.rows_now()):
            given = without_batch(value) if self.layout.has_batch else value
            self._acted(given[0] if self.layout.is_first else given, rows)

    def _acted(self, value: Any, rows: list[RequestRows]) -> Any:
        """Edit the value, then record it."""
        value = self._edited(value, rows)
        for name in self.recordings:
            recorded = [each for each in rows if name in self.state.requests[each.request].recordings]
            if recorded:
                self.state.recordings[name].add(self.address, self._taken(value, recorded), recorded)
        return value

    def _edited(self, value: Any, rows: list[RequestRows]) -> Any:
        """Return the value with the edits of each request applied to its rows; the same object if there are none."""
        copied = self.state.declared  # Compiled code expects changes in place.
        added: list[tuple[RequestRows, Tensor]] = []
        shape = None if self.layout is None else self.layout.tensor.shape[1:]
        for each in rows:
            request = self.state.requests[each.request]
            edits = request.edits_at(self.address)
            if (vector := _only_vector(edits, shape)) is not None:
                added.append((each, vector))
                continue
            for edit in edits:
                mine = self._part(value, slice(each.start, each.stop))
                for index, new in edit.apply(mine, each.position, request.prompt):
                    if not copied:
                        value, copied = map_tensors(Tensor.clone, value), True
                    value = self._put(value, slice(each.start, each.stop), index, new)
        if added:
            value = value if copied else map_tensors(Tensor.clone, value)
            self._add_vectors(value, added)
        return value

    def _add_vectors(self, value: Any, added: list[tuple[RequestRows, Tensor]]) -> None:
        """Add a vector to the rows of each of some requests, with a few operations for all of them."""
        held = [tensor for _, tensor in tensors(value)]
        device = held[0].device
        rows = torch.cat([torch.arange(each.start, each.stop) for each, _ in added]).to(device)
        counts = torch.tensor([each.stop - each.start for each, _ in added])
        which = torch.repeat_interleave(counts).to(device)
        vectors = torch.stack([vector for _, vector in added])[which]
        if self.layout is not None and self.layout.is_sum:
            held[0][rows] = held[0][rows] + held[1][rows] + vectors
            held[1][rows] = 0
        else:
            held[0][rows] = held[0][rows] + vectors

    def _part(self, value: Any, rows: slice) -> Any:
        if self.layout is not None and self.layout.is_sum:
            one, other = (tensor[rows] for _, tensor in tensors(value))
            return one + other
        return map_tensors(lambda tensor: tensor[rows], value)

    def _put(self, value: Any, rows: slice, index: Any, new: Any) -> Any:
        """Write the new rows into a value that is a copy already."""
        held = [tensor[rows] for _, tensor in tensors(value)]
        if self.layout is not None and self.layout.is_sum:
            held[0][index], held[1][index] = new, 0
            return value
        for tensor, (_, part) in zip(held, tensors(new), strict=True):
            tensor[index] = part
        return value

    def _taken(self, value: Any, rows: list[RequestRows]) -> Tensor:
        """Return the rows of the requests, copied."""
        start, stop = rows[0].start, rows[-1].stop
        held = [tensor for _, tensor in tensors(value)]
        if stop - start == sum(each.stop - each.start for each in rows):
            return held[0][start:stop] + held[1][start:stop] if len(held) > 1 else held[0][start:stop].clone()
        index = torch.cat([torch.arange(each.start, each.stop) for each in rows]).to(held[0].device)
        return held[0][index] + held[1][index] if len(held) > 1 else held[0][index]


def _only_vector(edits: list[RowEdit], shape: torch.Size | None) -> Tensor | None:
    """Return the vector of this shape that the edits of a request add to each row, if they do nothing else."""
    vector = edits[0].vector if len(edits) == 1 else None
    return vector if vector is not None and vector.shape == shape else None
