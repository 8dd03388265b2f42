"""The interface to :mod:`tenterhook.compiled`, which registers itself here. The engine does not import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from tenterhook.engine.compile_counts import Compiled

if TYPE_CHECKING:
    from types import FunctionType

    from tenterhook.engine.install import ForwardPatch
    from tenterhook.engine.session import Session

__all__ = ["CompiledSupport", "compiled_support", "register"]


class CompiledSupport(Protocol):
    """The functions that the engine calls if ``torch.compile`` was used in this process."""

    def runs(self, model: nn.Module) -> bool:
        """Return whether compiled code is known to run the model or a part of it."""

    def wait(self, session: Session) -> None:
        """Let an open session take part in compiled code when the compiler starts."""

    def keep_out(self, function: FunctionType) -> None:
        """Keep Dynamo from tracing a function of a waiting session as the start of a graph."""

    def join(self, session: Session) -> None:
        """Prepare a session that has waited, now that the compiler starts."""

    def stop_waiting(self, session: Session) -> None:
        """Undo :meth:`wait` at the end of the session."""

    def begin(self, session: Session) -> None:
        """Prepare a session after its actions are planned."""

    def with_traced_forward(self, patch: ForwardPatch, function: Any, general: Callable[[Any], Any]) -> Any:
        """Return a patched forward that carries the function for Dynamo to trace in its place."""

    def end(self, session: Session) -> Compiled:
        """End a session and return its counts."""

    def explained(self, session: Session, error: BaseException) -> BaseException | None:
        """Return a clearer error to raise instead of this one, or None to keep it."""

    def compile_counts(self, session: Session) -> Compiled:
        """Return the counts of an open session."""


_registered: list[CompiledSupport] = []


def register(support: CompiledSupport) -> None:
    """Register the support for compiled models."""
    _registered[:] = [support]


def compiled_support() -> CompiledSupport:
    """Return the registered support for compiled models.

    Raises:
        RuntimeError: nothing is registered. A session would silently miss all calls inside compiled code.
    """
    if not _registered:
        raise RuntimeError("tenterhook.compiled.engine_api was not imported; the file of each verb imports it")
    return _registered[0]
