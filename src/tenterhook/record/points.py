"""``th.points``: the points of a model, and after a run their shapes and numbers of calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tenterhook._tree import describe
from tenterhook.address import Selection, Selector, select
from tenterhook.errors import SessionError, TenterhookError
from tenterhook.record.tape import Tape
from tenterhook.record.verb import record

if TYPE_CHECKING:
    from tenterhook.address.tree import SeenValue

__all__ = ["points"]


def points(model: nn.Module, *selectors: Selector, inputs: Any = None, tape: Tape | None = None) -> Selection:
    """Return the points that the selectors match, or the outputs of all modules. Printing the result draws a tree.

    >>> from torch import nn
    >>> import tenterhook as th
    >>> th.points(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), inputs=torch.ones(4, 2))
    Sequential: 3 modules, 9 parameters, 3 points
    name     type        params  output  calls
    :return  Sequential       9  [4, 3]      1
    ├─ 0     Linear           9  [4, 3]      1
    └─ 1     ReLU                [4, 3]      1

    Args:
        model: any ``nn.Module``.
        *selectors: addresses, globs, modules, classes, regexes or predicates.
        inputs: arguments for one call of the model, to show shapes and numbers of calls: a tensor, a tuple of
            arguments, or a dict of keyword arguments. Parameters, buffers and the random state do not change.
        tape: a tape to take shapes and numbers of calls from, instead of ``inputs``.

    Returns:
        A ``Selection``. Other functions take it as a selector.

    Raises:
        AddressError: a selector matches nothing in the model.
        SessionError: the model cannot be called with ``inputs``.
    """
    seen = _seen(tape) if tape is not None else _survey(model, inputs) if inputs is not None else None
    return select(model, *selectors, seen=seen)


def _survey(model: nn.Module, inputs: Any) -> Mapping[str, SeenValue]:
    args = () if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else (inputs,)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    # Use copies of the buffers for this call: BatchNorm in train mode would update the real ones.
    copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    session = record(model, "**", copy="never")
    try:
        with torch.random.fork_rng(), torch.no_grad(), session as tape:
            torch.func.functional_call(model, copies, args, kwargs)
    except TenterhookError:
        raise
    except Exception as error:
        raise SessionError(_failed(model, session.tape, inputs, error)) from error
    return _seen(tape)


def _failed(model: nn.Module, tape: Tape, inputs: Any, error: Exception) -> str:
    found = tape.notes.get("failure")
    where = f", in {found['address']!r} ({found['kind']})" if found and found["address"] else ""
    return (
        f"{type(model).__name__} cannot be called with inputs={describe(inputs)}{where}: "
        f"{type(error).__name__}: {error}\n"
        "Give what the model takes: a tensor, a tuple of arguments, or a dict of keywords."
    )


def _seen(tape: Tape) -> Mapping[str, SeenValue]:
    from tenterhook.address.tree import SeenValue

    return {address: SeenValue(len(track.entries), _shape(tape, address)) for address, track in tape._tracks.items()}


def _shape(tape: Tape, address: str) -> str:
    try:
        shapes = dict.fromkeys(describe(value).replace("float32[", "[") for value in tape.calls(address))
    except TenterhookError:
        return ""
    return " | ".join(shapes)
