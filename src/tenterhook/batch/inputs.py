"""The inputs of several cases as one batch: rows one after the other, tokens padded and masked."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import Path, describe, map_tensors, replace_at, show_path, tensors
from tenterhook.batch.layout import CaseRows, WholeBatch
from tenterhook.errors import BatchError
from tenterhook.pytorch.wrappers import unwrapped

__all__ = ["CaseInputs", "InputNames", "joined_inputs", "lengths_of"]

MAIN, DECODER = "tokens", "decoder tokens"
# The arguments of transformers with one entry for each token, and the number that pads them; None: the padding token.
TOKENS: dict[str, int | None] = {
    "input_ids": None, "attention_mask": 0, "inputs_embeds": 0, "token_type_ids": 0, "position_ids": 0, "labels": -100,
    "decoder_input_ids": None, "decoder_attention_mask": 0, "decoder_inputs_embeds": 0,
}  # fmt: skip
MASKS = {MAIN: "attention_mask", DECODER: "decoder_attention_mask"}
NO_ROWS = "case {index} has no tensor with a dimension for rows in its inputs: {given}"
ROWS = "case {index}: its inputs have different numbers of rows: {sizes}"
TEXT = (
    "case {index} is text. Pass the tokenizer: th.batch(model, cases, tokenizer=tokenizer), or tokenize it: "
    "th.case(tokenizer(text, return_tensors='pt'))"
)


class InputNames:
    """The names of the arguments of a model's ``forward``."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(inspect.signature(type(unwrapped(model)).forward).parameters.values())[1:]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = [each.name for each in parameters if each.kind in positional]
        self.all = {each.name for each in parameters}

    def __contains__(self, name: str) -> bool:
        return name in self.all

    def of(self, path: Path) -> str | None:
        """Return the name of the argument at a path of ``(args, kwargs)``, or None inside a structure."""
        if len(path) != 2:  # noqa: PLR2004
            return None
        if path[0] == 1:
            return str(path[1])
        return self.positional[path[1]] if path[1] < len(self.positional) else None

    def axis(self, name: str | None) -> str | None:
        """Return the axis of tokens of an argument, if it has one and the model takes a mask for it."""
        if name not in TOKENS:
            return None
        axis = DECODER if name.startswith("decoder_") else MAIN
        # A decoder is causal, so that padding after its tokens is never seen by them.
        return axis if axis == DECODER or MASKS[MAIN] in self.all else None


@dataclass(frozen=True, slots=True)
class CaseInputs:
    """The arguments of one case: a tuple, a dict, the number of rows, and the number of tokens on each axis."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    lengths: dict[str, int]
    key: tuple[Any, ...]
    """what must be equal for two cases to run in one batch"""

    @classmethod
    def of(  # what a case and a batch have
        cls, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], names: InputNames, *, tokenizer: Any,
        device: torch.device | None, masked: bool,
    ) -> CaseInputs:  # fmt: skip
        """Return the arguments of a case, with text and dicts of a tokenizer as keyword arguments."""
        if len(args) == 1 and isinstance(args[0], str):
            if tokenizer is None:
                raise BatchError(TEXT.format(index=index))
            args = (tokenizer(args[0], return_tensors="pt"),)
        first: Any = args[0] if len(args) == 1 else None
        if isinstance(first, Mapping) and all(key in names for key in first):
            args, kwargs = (), {**map_tensors(lambda tensor: tensor.to(device), dict(first)), **kwargs}
        given = (args, kwargs)
        sizes = {path: tensor.shape[0] for path, tensor in tensors(given) if tensor.dim()}
        if not sizes:
            raise BatchError(NO_ROWS.format(index=index, given=describe(given)))
        if len(set(sizes.values())) > 1:
            raise BatchError(ROWS.format(index=index, sizes=", ".join(map(str, sizes.values()))))
        rows, lengths = next(iter(sizes.values())), lengths_of(names, given)
        if masked and MAIN in lengths:
            kwargs = _with_masks(args, kwargs, rows, lengths, names, [MAIN])
        return cls(args, kwargs, rows, lengths, _key(names, given))

    def hidden(self, names: InputNames) -> Tensor | None:
        """Return which tokens the case's own mask hides, ``[rows, tokens]``, or None if it hides none."""
        for path, tensor in tensors((self.args, self.kwargs)):
            if names.of(path) == MASKS[MAIN] and tensor.dim() == 2 and not bool(tensor.all()):  # noqa: PLR2004
                return tensor == 0
        return None

    @property
    def tokens(self) -> int:
        """The number of tokens of all rows, or the number of rows."""
        return self.rows * max(1, sum(self.lengths.values()))


def lengths_of(names: InputNames, given: Any) -> dict[str, int]:
    """Return the number of tokens of each axis."""
    lengths: dict[str, int] = {}
    for path, tensor in tensors(given):
        axis = names.axis(names.of(path))
        if axis is not None and tensor.dim() > 1:
            lengths.setdefault(axis, tensor.shape[1])
    return lengths


def _key(names: InputNames, given: Any) -> tuple[Any, ...]:
    """Return what two cases must have in common: the structure, the kinds and the shapes without rows and tokens."""
    parts: list[Any] = []
    for path, tensor in tensors(given):
        name = names.of(path)
        if name in MASKS.values() and tensor.dim() == 2:  # noqa: PLR2004  A missing mask is made.
            continue
        first = 1 if names.axis(name) is None else 2
        shape = tuple(tensor.shape[first:]) if tensor.dim() else (float(tensor),)
        parts.append((path, tensor.dim(), shape, tensor.dtype, tensor.device))
    # Numbers, flags and other objects are shared by the rows of a batch.
    constants = map_tensors(lambda _: None, given)
    shown = {key: value for key, value in constants[1].items() if value is not None}
    return (*parts, repr((constants[0], shown)))


def joined_inputs(
    cases: Sequence[CaseInputs], whole: WholeBatch, names: InputNames, padding_token: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a batch."""
    needed = {axis for axis, length in whole.lengths.items() if any(each.lengths.get(axis) != length for each in cases)}
    needed |= {axis for axis, mask in MASKS.items() if any(each.kwargs.get(mask) is not None for each in cases)}
    padded = [_padded(each, whole, names, padding_token, needed) for each in cases]
    joined: Any = padded[0]
    for path, tensor in tensors(padded[0]):
        if tensor.dim():
            parts = [dict(tensors(each))[path] for each in padded]
            joined = replace_at(joined, path, torch.cat(parts))
    return joined  # type: ignore[no-any-return]


def _padded(
    case: CaseInputs, whole: WholeBatch, names: InputNames, padding_token: int, masked: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given: Any = (case.args, _with_masks(case.args, case.kwargs, case.rows, case.lengths, names, masked))
    padding = whole.padding(CaseRows(0, case.rows, case.lengths))
    for path, tensor in list(tensors(given)):
        name = names.of(path)
        axis = names.axis(name)
        if name is None or axis is None or not padding[axis]:
            continue
        if tensor.dim() < 2 or tensor.shape[1] != case.lengths[axis]:  # noqa: PLR2004
            place = f"{name}{show_path(path[2:])}"
            raise BatchError(f"{place} has shape {list(tensor.shape)}, without {case.lengths[axis]} tokens to pad")
        number = TOKENS[name]
        new = _pad(tensor, padding[axis], padding_token if number is None else number, left=whole.pads_left)
        given = replace_at(given, path, new)
    return given  # type: ignore[no-any-return]


def _with_masks(  # the fields of a case, which may not be made yet
    args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, lengths: Mapping[str, int], names: InputNames,
    masked: Collection[str],
) -> dict[str, Any]:  # fmt: skip
    """Return the keyword arguments of a case, with a mask of ones for each axis that needs one."""
    kwargs = dict(kwargs)
    for axis in masked:
        mask = MASKS[axis]
        if mask in names and kwargs.get(mask) is None and mask not in names.positional[: len(args)]:
            like = next(tensor for _, tensor in tensors((args, kwargs)))
            kwargs[mask] = torch.ones(rows, lengths[axis], dtype=torch.long, device=like.device)
    return kwargs


def _pad(tensor: Tensor, count: int, number: int, *, left: bool) -> Tensor:
    fill = tensor.new_full((tensor.shape[0], count, *tensor.shape[2:]), number)
    return torch.cat([fill, tensor] if left else [tensor, fill], 1)
