"""One run of a model for ``tenterhook record``.

The run notes the execution order. If the model fails, the partial tape is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import click
import torch
from torch import Tensor, nn

from tenterhook._tree import describe, tensors
from tenterhook.address import Point, Selector, Site, resolve
from tenterhook.cli.errors import CommandError, ModelFailed, show_debug
from tenterhook.cli.inputs import Inputs
from tenterhook.edit.verb import edit
from tenterhook.engine.action import Action, Binding, Context
from tenterhook.engine.session import Session
from tenterhook.errors import CostError, NeverReached, SessionError, TenterhookError
from tenterhook.record.failure import failure
from tenterhook.record.tape import Tape
from tenterhook.record.tape_table import failure_lines
from tenterhook.record.verb import record

__all__ = ["LOSSES", "RunRequest", "calling", "run"]

Loss = Literal["auto", "sum", "mean", "max"]
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"sum": Tensor.sum, "mean": Tensor.mean, "max": Tensor.max}


@dataclass
class RunRequest:
    """The options of a run."""

    selectors: list[str] = field(default_factory=list)
    grad: bool = False
    loss: Loss = "auto"
    edits: Mapping[Selector, Any] = field(default_factory=dict)
    stop: bool = False
    keep: Literal["all", "last"] | int = "all"


class OrderNotes(Action):
    """An action that notes the order in which points are reached."""

    observes = True
    again = False
    reached = True

    def __init__(self, order: list[str], passed: Callable[[str], None]) -> None:
        self._order, self._passed = order, passed

    def __call__(self, value: Any, context: Context) -> None:  # noqa: ARG002  # the protocol's name
        self._order.append(f"{context.address}#{context.call}")
        self._passed(context.address)


def run(
    model: nn.Module, inputs: Inputs, asked: RunRequest, passed: Callable[[str], None] = lambda _: None
) -> tuple[Tape, Exception | None]:
    """Call the model once. Return its tape, and the error if the model failed."""
    points = resolve(model, asked.selectors or "**")
    recording = record(model, *(asked.selectors or ["**"]), grad=asked.grad, stop=asked.stop, keep=asked.keep)
    tape, order, failed = recording.tape, list[str](), None
    given = inputs.needing_gradients() if asked.grad else inputs
    try:
        with _noted(model, points, order, passed), _edited(model, asked.edits), recording:
            with contextlib.nullcontext() if asked.grad else torch.no_grad():
                output = model(*given.args, **given.kwargs)
            if asked.grad:
                loss_of(output, asked.loss).backward()
    except NeverReached:
        if any(point.explicit for point in points):
            raise  # For a pattern, the tape is empty, and the caller reports that.
    except (TenterhookError, CommandError):
        raise
    except Exception as error:  # noqa: BLE001  # any error of the model; the partial tape is kept
        show_debug()
        failed = error
        tape.notes.setdefault("failure", _elsewhere(error))
    tape.notes |= {"order": order, "inputs": _described(inputs)}
    if inputs.tokens:
        tape.notes["tokens"] = inputs.tokens
    return tape, failed


def loss_of(output: Any, how: Loss) -> Tensor:
    """Return the scalar to differentiate: the model's own loss, or a reduction of its first floating-point output."""
    own = getattr(output, "loss", None)
    if how == "auto" and isinstance(own, Tensor):
        return own
    found = [tensor for _, tensor in tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not found:
        raise CommandError("--grad: no output of the model requires a gradient, so backward cannot run.")
    return LOSSES["sum" if how == "auto" else how](found[0])


@contextlib.contextmanager
def calling(model: nn.Module) -> Iterator[None]:
    """Convert an error of the model to :class:`ModelFailed`, with the module that failed and its inputs."""
    try:
        yield
    except (TenterhookError, click.ClickException) as raised:
        error = raised.__cause__
        # th.points and th.cost raise an error of their own for an error of the model, with the model's as its cause.
        if not isinstance(raised, SessionError | CostError) or error is None or isinstance(error, TenterhookError):
            raise
        raise _model_failed(model, error) from raised
    except Exception as error:
        raise _model_failed(model, error) from error


def _model_failed(model: nn.Module, error: BaseException) -> ModelFailed:
    show_debug()
    found = failure(model, error) or _elsewhere(error)
    return ModelFailed("\n".join(["the model failed", *failure_lines(found)]))


@contextlib.contextmanager
def _noted(
    model: nn.Module, points: tuple[Point, ...], order: list[str], passed: Callable[[str], None]
) -> Iterator[None]:
    action = OrderNotes(order, passed)
    places = dict.fromkeys(point for point in points if point.site is not Site.PARAMETER)
    with Session(model, [Binding(point, action) for point in places], []):
        yield


def _edited(model: nn.Module, edits: Mapping[Selector, Any]) -> Any:
    return edit(model, edits) if edits else contextlib.nullcontext()


def _described(inputs: Inputs) -> dict[str, str]:
    positional = {str(number): describe(value) for number, value in enumerate(inputs.args)}
    return positional | {name: describe(value) for name, value in inputs.kwargs.items()}


def _elsewhere(error: BaseException) -> dict[str, Any]:
    return {
        "address": "",
        "kind": "",
        "error": type(error).__name__,
        "message": str(error)[:400],
        "where": "",
        "inputs": {},
        "parameters": {},
    }
