"""``th.batch`` and ``th.case``: several inputs in one run, each with its own edits, recordings and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tenterhook._text import counted
from tenterhook.errors import BatchError

if TYPE_CHECKING:
    from tenterhook.address import Selector
    from tenterhook.batch.result import BatchResult

__all__ = ["BatchCase", "batch", "case"]

LOSS = (
    "grad= is a function of the case's output that returns its loss, for example "
    "grad=lambda output: output.logits[0, -1, 5]; got {given!r}"
)


@dataclass(frozen=True, slots=True, eq=False)
class BatchCase:
    """One input with its edits and recordings. :func:`case` creates it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    edits: Mapping[Any, Any] = field(default_factory=dict)
    record: Sequence[Selector] = ()
    grad: Callable[[Any], Tensor] | None = None

    def __repr__(self) -> str:
        edits, points = counted(len(self.edits), "edit"), counted(len(self.record), "selector")
        return f"<case with {edits} and {points}{' and gradients' if self.grad is not None else ''}>"


def case(
    *args: Any,
    edits: Mapping[Any, Any] | None = None,
    record: Selector | Sequence[Selector] = (),
    grad: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> BatchCase:
    """Return one case for :func:`tenterhook.batch`: an input of the model, with its own edits and recordings.

    >>> import torch, tenterhook as th
    >>> th.case(torch.ones(1, 4), edits={"0": th.zero()}, record=["1"])
    <case with 1 edit and 1 selector>

    Args:
        *args: positional arguments of the model; or one text, or one dict of a tokenizer.
        edits: a dict of edits, as for :func:`tenterhook.edit`.
        record: the points to record, as for :func:`tenterhook.record`.
        grad: a function of the output that returns a loss. The tape then has the gradients of the recorded points.
        **kwargs: keyword arguments of the model.

    Raises:
        BatchError: there is no input, or an option has the wrong type.
    """
    if not args and not kwargs:
        raise BatchError("a case needs an input of the model: th.case(ids, edits={'h.3': th.zero()})")
    if edits is not None and not isinstance(edits, Mapping):
        raise BatchError(f"edits= is a dict of edits, as for th.edit: {{'h.3': th.zero()}}; got {edits!r:.80}")
    if grad is not None and not callable(grad):
        raise BatchError(LOSS.format(given=grad))
    selectors = tuple(record) if isinstance(record, (list, tuple)) else (record,)
    if grad is not None and not selectors:
        raise BatchError("grad= records the gradients of the points of record=, and there are none")
    return BatchCase(args, kwargs, dict(edits or {}), selectors, grad)


def batch(
    model: nn.Module,
    cases: Iterable[BatchCase],
    *,
    generate: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    batch: int | None = None,
) -> BatchResult:
    """Run several inputs together, each with its own edits, recordings and gradients.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> first = th.case(torch.ones(1, 4), edits={"1": th.zero(at=th.at[:, 2])}, record="1")
    >>> second = th.case(torch.zeros(3, 4), record="2", grad=lambda output: output.sum())
    >>> found = th.batch(model, [first, second])
    >>> found[0].tape["1"].shape, found[1].output.shape, found[1].tape.grad["2"].shape
    (torch.Size([1, 8]), torch.Size([3, 1]), torch.Size([3, 1]))

    Each result is the same as if the case had run alone. An index such as ``at=th.at[:, -1]`` refers to the case's own
    rows and tokens. Inputs of different lengths are padded and masked, on the right, or on the left for ``generate``;
    no edit or recording contains padding. Some cases also run alone and are compared with the batch, so the function
    of an edit may be called twice for a case. The gradients of parameters are not computed.

    Args:
        model: any ``nn.Module``.
        cases: results of :func:`tenterhook.case`.
        generate: options of ``model.generate``, which is then called instead of the model.
        tokenizer: the tokenizer for cases that are text.
        batch: the number of cases to run at once. By default it depends on the free memory. 1 runs them one by one.

    Returns:
        A :class:`tenterhook.BatchResult` with ``.output`` and ``.tape`` for each case.

    Raises:
        BatchError: an argument is wrong, or a case gives another result in the batch than alone, because the model
            mixes the rows of a batch.
        AddressError, EditError, NeverReached: as for :func:`tenterhook.edit` and :func:`tenterhook.record`.
    """
    from tenterhook.batch.runner import BatchRunner

    given: list[Any] = list(cases)
    for place, each in enumerate(given):
        if not isinstance(each, BatchCase):
            kind = type(each).__name__
            raise BatchError(f"case {place} is a {kind}; write th.case(ids, edits={{...}}, record=[...])")
    if not given:
        raise BatchError("a batch needs at least one case: th.batch(model, [th.case(ids)])")
    if batch is not None and (type(batch) is not int or batch < 1):
        raise BatchError(f"batch= is the number of cases to run at once, a positive int; got {batch!r}")
    if generate is not None and not callable(getattr(model, "generate", None)):
        raise BatchError(f"generate= calls model.generate, and {type(model).__name__} has no such method")
    return BatchRunner(model, given, generate=generate, tokenizer=tokenizer, most=batch).run()
