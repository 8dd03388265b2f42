"""The job of a harvest: the model, the points, the rule for rows, and the rows of one batch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tenterhook._tree import map_tensors
from tenterhook.address import Selector, resolve
from tenterhook.errors import HarvestError, TenterhookWarning, ValueChanged
from tenterhook.harvest.batch_source import digest
from tenterhook.harvest.early_rows import Begin, EarlyRows
from tenterhook.harvest.generated_rows import check_generation, generated_rows
from tenterhook.harvest.identity import Identity, identify
from tenterhook.harvest.rows import RowRule, tensor_at
from tenterhook.pytorch.layers import BATCH_NORMS, DROPOUTS
from tenterhook.record.kept_value import Copy
from tenterhook.record.verb import record
from tenterhook.store.device_copy import Piece

__all__ = ["Batch", "Job"]

Key = tuple[str, Literal["value", "grad", "row"]]
Loss = Callable[[Any, Any], Tensor]
Call = Callable[[nn.Module, Any], Any]

HOW = "th.harvest calls model(batch), model(*batch) or model(**batch); for another way pass call=lambda model, batch: …"
TRAINING = (
    "the model is in training mode: dropout makes these rows irreproducible, and batch norm changes the model. Call "
    "model.eval() first."
)


@dataclass(slots=True)
class Batch:
    """The rows of one batch, for every column."""

    rows: dict[Key, Tensor]
    samples: int
    begun: list[tuple[Key | None, Piece]] = field(default_factory=list)
    """The copies that were started during the run, in order. The key is None for a copy that is not used."""

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(next(iter(self.rows.values())))


@dataclass
class Job:
    """One model, some points and one rule for rows. It can be sent to another process."""

    model: nn.Module
    selectors: tuple[Selector, ...]
    taking: RowRule
    grad: Loss | None = None
    stop: bool = True
    copy: Copy = "auto"
    call: Call | None = None
    generate: Mapping[str, Any] | None = None
    addresses: tuple[str, ...] = field(init=False)
    found: tuple[str, ...] | None = None
    _tried: tuple[str, Batch] | None = field(default=None, repr=False)
    _can_begin: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        points = resolve(self.model, self.selectors) if self.selectors else ()
        if not points:
            raise HarvestError('name the points to harvest: th.harvest(model, batches, "h.6", to="acts")')
        if self.generate is not None:
            check_generation(self.model, {"grad": self.grad, "call": self.call, "reduce": self.taking.reduce})
        self.addresses = tuple(dict.fromkeys(str(point) for point in points))
        # Some parameters of an offloaded model are on the meta device until they are used. Its own hooks move the
        # inputs.
        devices = (each.device for each in self.model.parameters() if each.device.type != "meta")
        self.device = next(devices, torch.device("cpu"))
        self.gather = any(hasattr(type(each), "full_tensor") for each in self.model.parameters())
        if self.model.training and any(True for _ in self.model.modules()):
            self._warn_of_training()

    def _warn_of_training(self) -> None:
        if any(isinstance(module, (*DROPOUTS, *BATCH_NORMS)) and module.training for module in self.model.modules()):
            warnings.warn(TRAINING, TenterhookWarning, stacklevel=6)

    def identify(self, cutting: dict[str, Any], *, weights: bool = True) -> Identity:
        """Describe everything that the rows depend on."""
        return identify(self, cutting, weights=weights)

    # -- one batch ----------------------------------------------------------------------------------------------------

    def try_first(self, batch: Any) -> Batch:
        """Run the first batch to determine the columns of a row. The result is kept for :meth:`tried`."""
        made = self.run(batch, 0, self.begins(lambda _: None))  # There is no writer yet. Otherwise the run is the same.
        self._tried = (digest(batch), made)
        return made

    def tried(self, mark: str) -> Batch | None:
        """Return the result of ``try_first`` if ``mark`` is the digest of its batch, once. Otherwise return None."""
        tried, self._tried = self._tried, None
        return tried[1] if tried is not None and tried[0] == mark else None

    def run(self, batch: Any, first_sample: int, begin: Begin | None = None) -> Batch:
        """Run the model once and return the rows. ``begin`` starts copying rows while the model still runs."""
        if self.generate is not None:
            return self._generated(batch, first_sample)
        picked = self.taking.pick(batch, first_sample)
        ahead = EarlyRows(begin, self.taking, picked) if begin is not None and self._may_begin() else None
        try:
            values = self._values(batch, ahead)
        except ValueChanged:
            # The source of the model did not show that it changes values in place. From now on they are copied.
            if self.copy != "auto":
                raise
            self.copy = "always"
            values = self._values(batch, None)
        rows: dict[Key, Tensor] = {}
        facts, used = picked.facts, dict[int, Key]()
        for key, value in values.items():
            found = ahead.found(key[0], value) if ahead is not None else None
            if found is None:
                rows[key] = self.taking.take(value, picked, key[0])
            else:
                rows[key], used[id(found[1])] = found[0], key
            facts = self.taking.complete(picked, value) if key[1] == "value" else facts
        rows |= {(name, "row"): fact for name, fact in facts.items()}
        _check_aligned(rows)
        begun = [(used.get(id(piece)), piece) for piece in (ahead.pieces if ahead is not None else ())]
        self._can_begin = self._can_begin and len(used) == len(begun)
        return Batch(rows, picked.samples, begun)

    def _generated(self, batch: Any, first_sample: int) -> Batch:
        try:
            return Batch(*generated_rows(self, batch, first_sample))
        except ValueChanged:
            if self.copy != "auto":
                raise
            self.copy = "always"
            return Batch(*generated_rows(self, batch, first_sample))

    def begins(self, begin: Begin) -> Begin | None:
        """Return ``begin`` for ``run``, or None on the CPU, where nothing is copied."""
        return None if self.device.type == "cpu" else begin

    def _may_begin(self) -> bool:
        """Return whether copies may start early. Not if recorded values are themselves copied or gathered first."""
        is_plain = self.copy == "auto" and self.grad is None and not self.gather
        return is_plain and self._can_begin and not callable(self.taking.reduce)

    def _values(self, batch: Any, ahead: EarlyRows | None) -> dict[Key, Tensor]:
        inputs = map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch)
        chosen = self.found if self.found is not None else self.selectors
        stop = self.stop and self.grad is None
        session = record(self.model, *chosen, stop=stop, copy=self.copy, grad=self.grad is not None, gather=self.gather)
        session.tape.log.copies_held = False  # Nothing else changes the output before the rows are read.
        if ahead is not None:
            session.bindings.extend(ahead.bindings(session.points_now()))
        with contextlib.nullcontext() if self.grad is not None else torch.no_grad(), session as tape:
            output = self._called(inputs)
            if self.grad is not None:
                loss = self.grad(output, inputs)
                tape.backward(loss)
        found = self.found or tuple(address for address in self.addresses if address in tape)
        if self.found is None:
            self.found = found
        values: dict[Key, Tensor] = {(address, "value"): tensor_at(tape[address], address) for address in found}
        if self.grad is not None:
            values |= {(address, "grad"): tensor_at(tape.grad[address], address) for address in found}
        return values

    def _called(self, inputs: Any) -> Any:
        try:
            if self.call is not None:
                return self.call(self.model, inputs)
            if isinstance(inputs, Mapping):
                return self.model(**inputs)
            return self.model(*inputs) if isinstance(inputs, tuple | list) else self.model(inputs)
        except TypeError as error:
            error.add_note(HOW)
            raise


def _check_aligned(rows: dict[Key, Tensor]) -> None:
    counts = {key: len(tensor) for key, tensor in rows.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{address!r}: {count}" for (address, _), count in counts.items())
        text = f"the points do not have the same number of rows in a batch ({shown})"
        raise HarvestError(f"{text}, so they cannot be columns of one store. Harvest them into separate stores.")
