"""Child processes and temporary folders that are cleaned up even after an interrupt."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["ROOT", "raise_on_signals", "run", "temporary_folder"]

ROOT = Path(__file__).resolve().parents[1]
GRACE = 15  # seconds that interrupted tests have to end their own child processes


def run(command: Sequence[str | Path], environment: Mapping[str, str], *, output: IO[bytes] | None = None) -> int:
    """Run a command in the repository's root and return its exit code. On an interrupt, end it and its children."""
    # A separate session, so that one signal also reaches the workers of pytest.
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process group like Ctrl-C, then kill the remaining processes."""
    with _signals_ignored():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def temporary_folder(base: Path | None, *, keep: bool = False) -> Iterator[Path]:
    """Create a folder in `base` (or in the system's temporary folder).

    Remove it at the end, unless ``keep`` is true.
    """
    if base is not None:
        base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="tenterhook-versions-", dir=base))
    try:
        yield folder
    finally:
        if not keep:
            with _signals_ignored():  # Removing thousands of files takes seconds. A second Ctrl-C would leave the rest.
                shutil.rmtree(folder, ignore_errors=True)


def raise_on_signals() -> None:
    """Convert the signals that would end this process immediately to exceptions, so that it cleans up first."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell ignores SIGINT for commands started with `&`.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
