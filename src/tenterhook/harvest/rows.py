"""Conversion of values to rows: one row for each sample, or for each token that is not padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tenterhook._tree import describe, tensors
from tenterhook.errors import HarvestError
from tenterhook.harvest.batch_source import digest, size_of

__all__ = ["PickedRows", "RowRule", "tensor_at"]

By = Literal["sample", "token"]
Reduce = Literal["last", "mean", "max"] | Callable[[Tensor, Tensor | None], Tensor] | None
Mask = str | Callable[[Any], Tensor] | None

MATRIX = 2


@dataclass(frozen=True, slots=True)
class PickedRows:
    """The rows of one batch, determined before the model runs: the selected tokens and their facts."""

    samples: int
    mask: Tensor | None  # [samples, tokens]; None if all tokens are selected
    index: Tensor | None  # the selected positions in the flattened tokens; None if all are selected
    facts: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class RowRule:
    """The options that determine how rows are made."""

    by: By = "sample"
    mask: Mask = "attention_mask"
    reduce: Reduce = None
    project: Tensor | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.by not in ("sample", "token"):
            raise ValueError(f'rows= must be "sample" or "token"; got {self.by!r}')
        if isinstance(self.reduce, str) and self.reduce not in REDUCTIONS:
            raise ValueError(f"reduce= must be one of {', '.join(REDUCTIONS)}, or a function; got {self.reduce!r}")
        if isinstance(self.reduce, str) and self.by == "token":
            raise ValueError(f'reduce={self.reduce!r} makes one row of each sample; remove rows="token"')
        if self.project is not None and self.project.ndim != MATRIX:
            raise ValueError(f"project= must be a matrix [width, new width]; got {list(self.project.shape)}")

    def described(self) -> dict[str, Any]:
        """Return the options for the manifest, except the functions, which ``identify`` describes."""
        return {
            "rows": self.by,
            "project": None if self.project is None else digest(self.project),
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
        }

    # -- before the model runs ----------------------------------------------------------------------------------------

    def pick(self, batch: Any, first_sample: int) -> PickedRows:
        """Return the rows of a batch, as far as the batch determines them."""
        samples, mask = size_of(batch), self._mask(batch)
        numbers = torch.arange(first_sample, first_sample + samples)
        if self.by == "sample":
            return PickedRows(samples, mask, None, {"sample": numbers})
        tokens = _tokens(batch)
        shape = mask.shape if mask is not None else tokens.shape if tokens is not None else None
        if shape is None:
            return PickedRows(samples, None, None, {"sample": numbers})
        index = None if mask is None or bool(mask.all()) else mask.flatten().nonzero().flatten()
        facts = _facts(numbers, shape, _named_tensor(batch, "position_ids"))
        if tokens is not None and tokens.shape == shape:
            facts["token"] = tokens.flatten().to("cpu", torch.int32)
        if index is not None:
            facts = {name: fact[index] for name, fact in facts.items()}
        return PickedRows(samples, mask, index, facts)

    def _mask(self, batch: Any) -> Tensor | None:
        if self.mask is None:
            return None
        mask = self.mask(batch) if callable(self.mask) else _named_tensor(batch, self.mask)
        if mask is None:
            if isinstance(self.mask, str) and self.mask != "attention_mask":
                raise HarvestError(f"mask={self.mask!r}, but the batch has no such tensor; got {describe(batch)}")
            return None
        if mask.ndim != MATRIX:
            raise HarvestError(
                f"a mask must be [samples, tokens]; got {list(mask.shape)}. Pass a function of the batch as mask=."
            )
        return mask.bool().cpu()

    # -- after it -----------------------------------------------------------------------------------------------------

    def take(self, value: Tensor, picked: PickedRows, address: str) -> Tensor:
        """Return the rows of a value, detached, on the device of the value."""
        value = value.detach()
        if value.ndim == 0 or len(value) != picked.samples:
            raise HarvestError(NOT_SAMPLES.format(address=address, shape=list(value.shape), samples=picked.samples))
        if self.reduce is not None:
            value = self._reduced(value, picked, address)
        if self.by == "token":
            value = self._of_tokens(value, picked, address)
        if self.project is not None:
            value = value @ self.project.to(value)
        return value.to(self.dtype) if self.dtype is not None and value.is_floating_point() else value

    def _reduced(self, value: Tensor, picked: PickedRows, address: str) -> Tensor:
        mask = picked.mask
        if callable(self.reduce):
            return self.reduce(value, None if mask is None else mask.to(value.device))
        if value.ndim < MATRIX + 1:
            text = f"reduce={self.reduce!r} reduces the tokens of [samples, tokens, …]"
            raise HarvestError(f"{text}, and {address!r} is {list(value.shape)}.")
        if mask is not None and mask.shape != value.shape[:2]:
            raise HarvestError(NOT_TOKENS.format(address=address, shape=list(value.shape), mask=list(mask.shape)))
        return REDUCTIONS[self.reduce](value, mask)  # type: ignore[index]

    def _of_tokens(self, value: Tensor, picked: PickedRows, address: str) -> Tensor:
        if value.ndim < MATRIX:
            raise HarvestError(f'rows="token" needs [samples, tokens, …], and {address!r} is {list(value.shape)}.')
        mask = picked.mask
        if mask is not None and mask.shape != value.shape[:2]:
            raise HarvestError(NOT_TOKENS.format(address=address, shape=list(value.shape), mask=list(mask.shape)))
        flat = value.flatten(0, 1)
        return flat if picked.index is None else flat.index_select(0, picked.index.to(value.device, non_blocking=True))

    def complete(self, picked: PickedRows, value: Tensor) -> dict[str, Tensor]:
        """Return the facts of the rows, if the number of tokens is only known from the value."""
        if self.by == "sample" or "position" in picked.facts or value.ndim < MATRIX:
            return picked.facts
        return _facts(picked.facts["sample"], value.shape[:2], None)


NOT_SAMPLES = (
    "{address!r} has the shape {shape} for a batch of {samples} samples: its first dimension must be the samples. Pass "
    "a function as reduce= that returns one row per sample."
)
NOT_TOKENS = (
    "{address!r} has the shape {shape}, and the mask of the batch is {mask}: they must agree in samples and tokens. "
    "Pass a function of the batch as mask=, or mask=None."
)


def _last(value: Tensor, mask: Tensor | None) -> Tensor:
    """Return the value at the last selected token of each sample."""
    if mask is None:
        return value[:, -1]
    places = torch.arange(mask.shape[1]).expand_as(mask).masked_fill(~mask, 0).amax(1)
    return value[torch.arange(len(value), device=value.device), places.to(value.device)]


def _mean(value: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over tokens, computed at least in float32 and converted back."""
    wide = value.float() if value.dtype.itemsize < torch.float32.itemsize else value
    if mask is None:
        return wide.mean(1).to(value.dtype)
    weight = mask.to(value.device).reshape(*mask.shape, *[1] * (value.ndim - 2))
    return (wide.where(weight, 0).sum(1) / weight.sum(1)).to(value.dtype)


def _max(value: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return value.amax(1)
    weight = mask.to(value.device).reshape(*mask.shape, *[1] * (value.ndim - 2))
    return value.masked_fill(~weight, float("-inf")).amax(1)


REDUCTIONS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {"last": _last, "mean": _mean, "max": _max}


def tensor_at(value: Any, address: str) -> Tensor:
    """Return the tensor to store from a value.

    This is the value itself, the first element of a tuple (as transformer blocks return), or the only tensor in it.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple | list) and value and isinstance(value[0], Tensor):
        return value[0]
    found = [tensor for _, tensor in tensors(value)]
    if len(found) != 1:
        text = f"{address!r} is {describe(value)}, which cannot be converted to rows"
        raise HarvestError(f"{text}: choose a point whose value is one tensor; see th.points(model, inputs=…).")
    return found[0]


def _tokens(batch: Any) -> Tensor | None:
    """Return the token ids of a batch, or None."""
    found = _named_tensor(batch, "input_ids")
    if found is None:
        found = batch if isinstance(batch, Tensor) else next((each for _, each in tensors(batch)), None)
    is_tokens = found is not None and found.ndim == MATRIX and not found.is_floating_point()
    return found if is_tokens else None


def _named_tensor(batch: Any, name: str) -> Tensor | None:
    found = batch.get(name) if isinstance(batch, Mapping) else None
    return found if isinstance(found, Tensor) else None


def _facts(numbers: Tensor, shape: Any, positions: Tensor | None) -> dict[str, Tensor]:
    samples, tokens = shape
    if positions is None or positions.shape != shape:
        positions = torch.arange(tokens).expand(samples, tokens)
    return {"sample": numbers.repeat_interleave(tokens), "position": positions.flatten().to("cpu", torch.int32)}
