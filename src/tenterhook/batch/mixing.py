"""The comparison of a case in a batch with the same case alone, and the search for what mixes the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import show_path, tensors
from tenterhook.batch.case_tape import is_shared
from tenterhook.batch.result import CaseRun
from tenterhook.errors import BatchError
from tenterhook.record.tape import TapeView

__all__ = ["difference", "mixes", "size_of", "values_differ"]

# Largest relative difference between a batched result and a single one: kernels differ, and some models compute parts
# in float32 whatever their dtype is.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
MOST_STEPS = 64  # Later steps of a generation in which hidden tokens are looked for.
GRADIENTS = 10  # Differences grow in the backward pass.
MIXES = "case {index} gives another result in the batch than alone: {difference}.{first}\n{fix}"
OUTPUT = "the output differs"
FIRST = " The first difference is at {address!r} ({kind})."
FIX = (
    "The model mixes the rows of a batch{padding}. Run the cases one at a time: th.batch(..., batch=1); or make the "
    "model treat each row by itself."
)
TRAINING = "The model is in training mode: dropout differs in each run, and batch norm mixes rows. Call model.eval()."
SAMPLING = "do_sample=True draws other tokens in a batch than alone. Use do_sample=False, or th.batch(..., batch=1)."
POINT = (
    "The output is the same, so the model keeps the rows apart, and this value has them in another order, as inside a "
    "mixture of experts. Do not record it, or run the cases one at a time: th.batch(..., batch=1)."
)
HIDDEN = (
    "The mask of this case hides tokens, and what the model computes there has no meaning. Leave them out of grad= and "
    "of edits, or run the cases one at a time: th.batch(..., batch=1)."
)
PADDING = ", or it does not hide padding: cases of equal length need none"


def difference(alone: CaseRun, batched: CaseRun, hidden: Tensor | None) -> str:
    """Return the first difference of two results, or an empty text if they agree.

    ``hidden``: the tokens that the case's own mask hides. What a model computes there has no meaning, and is not
    compared.
    """
    far = _far(alone.output, batched.output, hidden)
    if far:
        return f"{OUTPUT} {far}"
    far = _tapes_differ(alone.tape, batched.tape, hidden)
    if far:
        return far
    # Alone, a value that an edit replaced by a constant has no gradient. In the batch it has one.
    mine, theirs = alone.tape.grad, batched.tape.grad
    extra = [name for name in theirs if name not in mine]
    return _tapes_differ(mine, theirs, hidden, GRADIENTS, "the gradient of ", extra)


def _tapes_differ(  # two tapes and what to know of them
    mine: TapeView, theirs: TapeView, hidden: Tensor | None, factor: int = 1, what: str = "", extra: Sequence[str] = ()
) -> str:  # fmt: skip
    names = [name for name in theirs if name not in extra]
    # All cases share some values, and their gradients there cannot be separated.
    missing = [name for name in mine if name not in names and not (what and is_shared(theirs, name))]
    if missing:
        return f"{what}{missing[0]!r} was recorded only alone"
    for address in names:
        far = _far(mine[address], theirs[address], hidden, factor, partly=bool(what))
        if far:
            return f"{what}{address!r} differs {far}"
    return ""


def _far(one: Any, other: Any, hidden: Tensor | None, factor: int = 1, *, partly: bool = False) -> str:
    """Return how two values differ, or an empty text if they agree. The second may lack tensors if ``partly``."""
    mine, theirs = dict(tensors(one)), dict(tensors(other))
    if partly:
        mine = {path: tensor for path, tensor in mine.items() if path in theirs}
    if mine.keys() != theirs.keys():
        return f"in its structure: {len(mine)} tensors alone, {len(theirs)} in the batch"
    for path, tensor in mine.items():
        far = _tensors_far(_shown(tensor, hidden), _shown(theirs[path], hidden), factor)
        if far:
            return f"{f'at {show_path(path)} ' if path else ''}{far}"
    return ""


def _shown(tensor: Tensor, hidden: Tensor | None) -> Tensor:
    """Return a tensor with zeros at the tokens that a mask hides, wherever a dimension has the tokens."""
    if hidden is None or not tensor.dim() or not tensor.is_floating_point():
        return tensor
    rows, tokens = hidden.shape
    hidden = hidden.to(tensor.device)
    if tensor.shape[0] == rows * tokens and tokens > 1:
        return tensor.masked_fill(hidden.view(-1, *[1] * (tensor.dim() - 1)), 0)
    for place in range(1, tensor.dim()) if tensor.shape[0] == rows else ():
        size = tensor.shape[place]
        if (
            tokens <= size <= tokens + MOST_STEPS
        ):  # Keys of a later step of a generation: the new tokens are not hidden.
            shape = [1] * tensor.dim()
            shape[0], shape[place] = rows, size
            tensor = tensor.masked_fill(nn.functional.pad(hidden, (0, size - tokens)).view(shape), 0)
    return tensor


def _tensors_far(one: Tensor, other: Tensor, factor: int) -> str:
    if one.shape != other.shape:
        return f"in shape: {list(one.shape)} alone, {list(other.shape)} in the batch"
    if one.is_complex() and other.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if not one.is_floating_point():
        return "" if torch.equal(one, other) else "in its integers"
    if not one.numel():
        return ""
    apart = (one.detach().double() - other.detach().double()).abs()
    gap = float(apart.nan_to_num(0.0).max())  # Equal infinities differ by NaN.
    size = float(one.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).max())
    alike = torch.equal(one.isfinite(), other.isfinite())
    if alike and gap <= factor * TOLERANCE.get(one.dtype, 0.1) * max(size, 1e-12):
        return ""
    return f"by {gap:.2g}, and the largest value is {size:.2g}"


def mixes(
    index: int, found: str, first: tuple[str, str] | None, *, padded: bool, model: nn.Module, samples: bool, hides: bool
) -> BatchError:
    """Return the error for a case that gives another result in the batch."""
    fix = FIX.format(padding=PADDING if padded else "")
    if samples:
        fix = SAMPLING
    elif any(module.training for module in model.modules()):
        fix = TRAINING
    elif not found.startswith(OUTPUT):
        fix = HIDDEN if hides else POINT
    shown = FIRST.format(address=first[0], kind=first[1]) if first is not None else ""
    return BatchError(MIXES.format(index=index, difference=found, first=shown, fix=fix))


def values_differ(one: Any, other: Any, hidden: Tensor | None = None) -> bool:
    """Return whether two values differ by more than kernels do, apart from hidden tokens."""
    return bool(_far(one, other, hidden))


def size_of(output: Any) -> float:
    """Return the largest number in an output, to choose cases with small ones."""
    return max(
        (float(t.detach().abs().max()) for _, t in tensors(output) if t.is_floating_point() and t.numel()), default=0.0
    )
