"""What is harvested: the model, the points, how rows are made, and the values of one batch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor, nn

from tenterhook._tree import map_tensors
from tenterhook.address import Selector, resolve
from tenterhook.errors import HarvestError, TenterhookWarning, ValueChanged
from tenterhook.harvest.rows import Taking, named, tensor_at
from tenterhook.harvest.source import digest
from tenterhook.record.capture import Copy
from tenterhook.record.verb import record
from tenterhook.sinks.shards_file import as_bytes

__all__ = ["Batch", "Job", "weights_of"]

HASHING = 4  # threads
Key = tuple[str, Literal["value", "grad", "row"]]
Loss = Callable[[Any, Any], Tensor]
Call = Callable[[nn.Module, Any], Any]

HOW = (
    "th.harvest calls model(batch), model(*batch) or model(**batch); give call=lambda model, batch: … for another way."
)
TRAINING = (
    "the model is in training mode: dropout and the like make rows that nobody can make again, and batch norm changes "
    "the model. Call model.eval() first."
)


@dataclass(slots=True)
class Batch:
    """What one batch came to: the rows of every column."""

    rows: dict[Key, Tensor]
    samples: int

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(next(iter(self.rows.values())))


@dataclass
class Job:
    """One model, some points, one way to make rows. It can be sent to another process."""

    model: nn.Module
    selectors: tuple[Selector, ...]
    taking: Taking
    grad: Loss | None = None
    stop: bool = True
    copy: Copy = "auto"
    call: Call | None = None
    addresses: tuple[str, ...] = field(init=False)
    found: tuple[str, ...] | None = None
    _tried: tuple[str, Batch] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        points = resolve(self.model, self.selectors) if self.selectors else ()
        if not points:
            raise HarvestError('name the points to harvest: th.harvest(model, batches, "h.6", to="acts")')
        self.addresses = tuple(dict.fromkeys(str(point) for point in points))
        parameter = next(self.model.parameters(), None)
        self.device = parameter.device if parameter is not None else torch.device("cpu")
        self.gather = any(hasattr(type(each), "full_tensor") for each in self.model.parameters())
        if self.model.training and any(True for _ in self.model.modules()):
            self._warn_of_training()

    def _warn_of_training(self) -> None:
        risky = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001  # all kinds of them
        if any(isinstance(module, risky) and module.training for module in self.model.modules()):
            warnings.warn(TRAINING, TenterhookWarning, stacklevel=6)

    def described(self) -> dict[str, Any]:
        """What a manifest says of it, and a resumed harvest must say too."""
        return {
            "model": {
                "class": f"{type(self.model).__module__}.{type(self.model).__qualname__}",
                "weights": weights_of(self.model),
                "training": self.model.training,
            },
            "points": list(self.addresses),
            **self.taking.described(),
            "grad": None if self.grad is None else named(self.grad),
            "call": None if self.call is None else named(self.call),
        }

    # -- one batch ----------------------------------------------------------------------------------------------------

    def try_first(self, batch: Any) -> Batch:
        """Run the first batch in order to find out what a row is; who asks for it next has it without another run."""
        made = self.run(batch, 0)
        self._tried = (digest(batch), made)
        return made

    def tried(self, mark: str) -> Batch | None:
        """What the first batch came to, if it was tried, and if this is it; once."""
        tried, self._tried = self._tried, None
        return tried[1] if tried is not None and tried[0] == mark else None

    def run(self, batch: Any, first_sample: int) -> Batch:
        """Run the model once, and make the rows of what passed."""
        picked = self.taking.pick(batch, first_sample)
        try:
            values = self._values(batch)
        except ValueChanged:
            # The model gave no sign that it changes values in place. From now on they are copied.
            if self.copy != "auto":
                raise
            self.copy = "always"
            values = self._values(batch)
        rows: dict[Key, Tensor] = {}
        facts = picked.facts
        for key, value in values.items():
            rows[key] = self.taking.take(value, picked, key[0])
            facts = self.taking.complete(picked, value) if key[1] == "value" else facts
        rows |= {(name, "row"): fact for name, fact in facts.items()}
        _check_aligned(rows)
        return Batch(rows, picked.samples)

    def _values(self, batch: Any) -> dict[Key, Tensor]:
        inputs = map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch)
        chosen = self.found if self.found is not None else self.selectors
        stop = self.stop and self.grad is None
        session = record(self.model, *chosen, stop=stop, copy=self.copy, grad=self.grad is not None, gather=self.gather)
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
        raise HarvestError(f"{text}, so that they cannot stand beside each other. Harvest them into separate stores.")


def weights_of(model: nn.Module) -> str:
    """A digest of all parameters and buffers that a state dict has, with their names.

    It is made anew each time: what changes a weight through ``.data`` leaves no trace by which it could be noticed.
    """
    weights = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    with ThreadPoolExecutor(HASHING) as pool:
        parts = list(pool.map(_digest_of, weights.values()))
    lines = [f"{name} {part}\n" for name, part in zip(weights, parts, strict=True)]
    whole = xxhash.xxh3_128("".join(lines).encode()).hexdigest()
    spread = any(hasattr(tensor, "to_local") for tensor in weights.values())
    return _of_all_processes(whole) if spread else whole


def _digest_of(tensor: Tensor) -> str:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    kind = f"{tensor.dtype} {list(tensor.shape)}"
    if local.device.type == "meta":  # An offloaded weight is elsewhere; its name and shape must do.
        return kind
    return f"{kind} {xxhash.xxh3_128(as_bytes(local.detach().cpu().contiguous())).hexdigest()}"


def _of_all_processes(digest: str) -> str:
    """One digest of a model that is spread over processes, the same in each, and for any number of copies of it."""
    from torch import distributed

    parts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, digest)
    return xxhash.xxh3_128("".join(sorted(set(parts))).encode()).hexdigest()
