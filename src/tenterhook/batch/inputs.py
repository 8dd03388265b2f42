"""The inputs of several cases as one batch: rows one after the other, tokens padded and masked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import Path, describe, map_tensors, replace_at, show_path, tensors
from tenterhook.batch.layout import WholeBatch
from tenterhook.errors import BatchError
from tenterhook.pytorch.modes import copy_all
from tenterhook.pytorch.wrappers import unwrapped

__all__ = ["CaseInputs", "InputNames", "joined_inputs"]

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
        found = [(path, tensor, names.of(path)) for path, tensor in tensors((args, kwargs))]
        sizes = [tensor.shape[0] for _, tensor, _ in found if tensor.dim()]
        if not sizes:
            raise BatchError(NO_ROWS.format(index=index, given=describe((args, kwargs))))
        if len(set(sizes)) > 1:
            raise BatchError(ROWS.format(index=index, sizes=", ".join(map(str, sizes))))
        rows, lengths = sizes[0], _lengths(names, found)
        key = _key(names, found, args, kwargs)
        if masked and MAIN in lengths:
            kwargs = _with_mask(args, kwargs, rows, lengths[MAIN], names)
        return cls(args, kwargs, rows, lengths, key)

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


def _lengths(names: InputNames, found: Sequence[tuple[Path, Tensor, str | None]]) -> dict[str, int]:
    """Return the number of tokens of each axis."""
    lengths: dict[str, int] = {}
    for _, tensor, name in found:
        axis = names.axis(name)
        if axis is not None and tensor.dim() > 1:
            lengths.setdefault(axis, tensor.shape[1])
    return lengths


def _key(
    names: InputNames, found: Sequence[tuple[Path, Tensor, str | None]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return what two cases must have in common: the structure, the kinds and the shapes without rows and tokens."""
    parts: list[Any] = []
    for path, tensor, name in found:
        if name in MASKS.values() and tensor.dim() == 2:  # noqa: PLR2004  A missing mask is made.
            continue
        first = 1 if names.axis(name) is None else 2
        shape = tuple(tensor.shape[first:]) if tensor.dim() else (float(tensor),)
        parts.append((path, tensor.dim(), shape, tensor.dtype, tensor.device))
    # Numbers, flags and other objects are shared by the rows of a batch.
    constants = map_tensors(lambda _: None, (args, kwargs))
    shown = {key: value for key, value in constants[1].items() if value is not None}
    return (*parts, repr((constants[0], shown)))


def joined_inputs(
    cases: Sequence[CaseInputs], whole: WholeBatch, names: InputNames, padding_token: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a batch."""
    parts = [dict(tensors((each.args, each.kwargs))) for each in cases]
    joined: Any = (cases[0].args, dict(cases[0].kwargs))
    for axis, mask in MASKS.items():
        given = [own.get((1, mask)) for own in parts]
        some = any(each is not None for each in given)
        padded = axis in whole.lengths and any(each.lengths.get(axis) != whole.lengths[axis] for each in cases)
        if (some or padded) and mask in names and mask not in names.positional[: len(cases[0].args)]:
            device = next(iter(parts[0].values())).device
            lengths = [each.lengths[axis] for each in cases for _ in range(each.rows)]
            joined[1][mask] = _mask(lengths, whole.lengths[axis], device, left=whole.pads_left)
            if some:
                for own, each in zip(parts, cases, strict=True):
                    if own.get((1, mask)) is None:
                        own[1, mask] = torch.ones(each.rows, each.lengths[axis], dtype=torch.long, device=device)
    for path, tensor in list(tensors(joined)):
        if tensor.dim() and path in parts[0]:
            new = _joined_tensor([own[path] for own in parts], path, cases, whole, names, padding_token)
            joined = replace_at(joined, path, new)
    return joined  # type: ignore[no-any-return]


def _mask(lengths: Sequence[int], longest: int, device: torch.device, *, left: bool) -> Tensor:
    """Return a mask that hides the padding of rows with so many tokens."""
    places, own = torch.arange(longest, device=device), torch.tensor(lengths, device=device)[:, None]
    return (places >= longest - own if left else places < own).long()


def _joined_tensor(  # all of it is needed, and it is called in one place
    parts: list[Tensor], path: Path, cases: Sequence[CaseInputs], whole: WholeBatch, names: InputNames,
    padding_token: int,
) -> Tensor:  # fmt: skip
    """Return the rows of all cases in one tensor, padded if they have tokens."""
    name = names.of(path)
    axis = names.axis(name)
    if name is None or axis is None or all(each.lengths[axis] == whole.lengths[axis] for each in cases):
        return torch.cat(parts)
    for part, each in zip(parts, cases, strict=True):
        if part.dim() < 2 or part.shape[1] != each.lengths[axis]:  # noqa: PLR2004
            place = f"{name}{show_path(path[2:])}"
            raise BatchError(f"{place} has shape {list(part.shape)}, without {each.lengths[axis]} tokens to pad")
    number = TOKENS[name]
    number = padding_token if number is None else number
    longest, left = whole.lengths[axis], whole.pads_left
    if len({part.dtype for part in parts}) > 1 or parts[0].is_floating_point():  # A float may need a gradient.
        return torch.cat([_pad(part, longest - part.shape[1], number, left=left) for part in parts])
    out = parts[0].new_full((whole.rows, longest, *parts[0].shape[2:]), number)
    targets, sources, row = [], [], 0
    for part in parts:
        start = longest - part.shape[1] if left else 0
        for own in part:  # A copy of rows is one kernel if their strides are those of the batch.
            targets.append(out[row].narrow(0, start, part.shape[1]))
            sources.append(own)
            row += 1
    copy_all(targets, sources)
    return out


def _with_mask(
    args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, length: int, names: InputNames
) -> dict[str, Any]:
    """Return the keyword arguments of a case, with a mask of ones if it needs one."""
    mask = MASKS[MAIN]
    if mask not in names or kwargs.get(mask) is not None or mask in names.positional[: len(args)]:
        return kwargs
    like = next(tensor for _, tensor in tensors((args, kwargs)))
    return {**kwargs, mask: torch.ones(rows, length, dtype=torch.long, device=like.device)}


def _pad(tensor: Tensor, count: int, number: int, *, left: bool) -> Tensor:
    fill = tensor.new_full((tensor.shape[0], count, *tensor.shape[2:]), number)
    return torch.cat([fill, tensor] if left else [tensor, fill], 1)
