"""Features that depend on PyTorch's internals, and their availability in the installed release.

Each feature has a probe: a small run that checks the behaviour that the feature needs. It runs once per process, before
the first session that needs the feature. A probe has three outcomes: the fast way works; a slower public way is used
instead; or the feature is unavailable, and a session that needs it raises ``UnsupportedTorch`` when it starts.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from tenterhook.errors import UnsupportedTorch

__all__ = [
    "FEATURES",
    "Feature",
    "ProbeFailed",
    "Status",
    "check",
    "feature",
    "in_clean_thread",
    "is_available",
    "require",
    "works",
]


class Status(StrEnum):
    """The outcome of a probe."""

    FAST = "fast"
    FALLBACK = "fallback"
    UNAVAILABLE = "unavailable"


class ProbeFailed(Exception):
    """An error in a probe: PyTorch does not behave as tenterhook needs."""


@dataclass(slots=True)
class Feature:
    """A part of tenterhook that depends on the behaviour of PyTorch's internals."""

    name: str
    used_by: str
    """the uses that need it, in a user's words"""
    probe: Callable[[], str | None]
    """raises if the feature does not work; returns the reason for using a fallback, or None"""
    still_works: str
    status: Status | None = None
    """None until the probe has run"""
    why: str = ""

    def run(self) -> Status:
        """Run the probe, if it has not run yet."""
        with _lock:
            if self.status is None:
                self._run()
        return self.status or Status.UNAVAILABLE

    def _run(self) -> None:
        try:
            reason = in_clean_thread(self.probe)
        except Exception as error:  # noqa: BLE001 - any error makes the feature unavailable
            self.status, self.why = Status.UNAVAILABLE, f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            self.status = Status.FALLBACK if reason else Status.FAST
            self.why = reason or ""

    def error(self) -> UnsupportedTorch:
        """Return the error for a session that needs this feature when it is unavailable."""
        return UnsupportedTorch(
            f"{self.name} is not available with torch {torch.__version__}, and it is needed for {self.used_by}.\n"
            f"Reason: {self.why}\n"
            f"Still works: {self.still_works}\n"
            "`tenterhook doctor` lists every feature. Please report this with its output."
        )


FEATURES: dict[str, Feature] = {}
_lock = threading.RLock()
_work: set[tuple[str, ...]] = set()
"""Groups of features that all work, so that :func:`require` needs only one lookup."""


def _patchable() -> tuple[Any, ...]:
    """Return the current functions of PyTorch that other libraries may replace."""
    return nn.Module.__call__, torch_checkpoint.checkpoint


_probed = _patchable()
"""The result of :func:`_patchable` when the probes ran."""


def _probe_again_if_patched() -> None:
    """Discard the outcomes of the probes if another library has patched PyTorch since."""
    global _probed  # noqa: PLW0603 - global, like the outcomes
    with _lock:
        now = _patchable()
        if now != _probed:
            _probed = now
            _work.clear()
            for each in FEATURES.values():
                each.status, each.why = None, ""


def _unlock() -> None:
    """Create a new lock in a forked process: a thread that does not exist there may hold the old one."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def feature(
    name: str, *, used_by: str, still_works: str
) -> Callable[[Callable[[], str | None]], Callable[[], str | None]]:
    """Register the decorated function as the probe of a feature."""

    def register(probe: Callable[[], str | None]) -> Callable[[], str | None]:
        FEATURES[name] = Feature(name, used_by, probe, still_works)
        return probe

    return register


def is_available(name: str) -> bool:
    """Return whether a feature works, directly or with its fallback."""
    _probe_again_if_patched()
    return FEATURES[name].run() is not Status.UNAVAILABLE


def require(*names: str) -> None:
    """Raise ``UnsupportedTorch`` unless all of these features work."""
    if names in _work and nn.Module.__call__ is _probed[0] and torch_checkpoint.checkpoint is _probed[1]:
        return
    _probe_again_if_patched()
    for name in names:
        found = FEATURES[name]
        if found.run() is Status.UNAVAILABLE:
            raise found.error()
    _work.add(names)


def works(name: str) -> bool:
    """Return whether a feature works, directly or with its fallback. Fast, once the probe has run."""
    if (name,) in _work and nn.Module.__call__ is _probed[0] and torch_checkpoint.checkpoint is _probed[1]:
        return True
    if not is_available(name):
        return False
    _work.add((name,))
    return True


def check(holds: object, what: str) -> None:
    """Fail the running probe with ``what`` unless ``holds`` is true."""
    if not holds:
        raise ProbeFailed(what)


class _ProbeThread:
    """A thread in which probes run, one after the other.

    Gradient mode, autocast, inference mode, torch.func transforms, dispatch modes and the default device are settings
    of a thread. In this thread a probe always sees PyTorch's defaults, whatever the user has switched on. The thread is
    never ended: in CUDA builds of torch 2.10, on a machine without a GPU, tracing in a thread that ends later leaves a
    dangling pointer to memory of that thread, and the process crashes in a later backward pass.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], str | None], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tenterhook-probe", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True if it can run probes. A forked child process has only its main thread."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """True in this thread itself, which cannot wait for itself."""
        return threading.current_thread() is self._thread

    def run(self, probe: Callable[[], Any]) -> Any:
        """Run a probe in the thread and wait for it. Return its result or raise its error."""
        answer: queue.SimpleQueue[tuple[str | None, BaseException | None]] = queue.SimpleQueue()
        self._jobs.put((probe, answer))
        reason, error = answer.get()
        if error is not None:
            raise error
        return reason

    def _work(self) -> None:
        while True:
            probe, answer = self._jobs.get()
            try:
                answer.put((probe(), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
                answer.put((None, error))


_probe_thread: _ProbeThread | None = None


def in_clean_thread(probe: Callable[[], Any]) -> Any:
    """Run a probe in a thread with PyTorch's default settings."""
    global _probe_thread  # noqa: PLW0603 - started with the first probe
    if _probe_thread is not None and _probe_thread.is_current:  # A probe asks for another one.
        return probe()
    if _probe_thread is None or not _probe_thread.is_alive:
        _probe_thread = _ProbeThread()
    return _probe_thread.run(probe)
