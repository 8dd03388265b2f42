"""Locks: only one job at a time writes to a store. A job is one process, or several processes with the same job id.

In a directory the lock is an ``flock``, which the kernel releases as soon as the process ends, for any reason. Where
this is not available, as in an object store, every process of a job writes a note and updates it every few seconds. A
note is ignored if it is old, or if its process on this machine has ended.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tenterhook.errors import StoreError

__all__ = ["FOREVER", "Holder", "NoLocks", "held_by_note", "held_folder"]

LOCK, NOTES = ".lock", ".locks"
BEAT = 10.0  # seconds between two updates of a note
STALE = 60.0  # seconds after which a note is ignored
GRACE = 30.0  # seconds that one process of a job waits for another one to start
PAUSE = 0.2  # seconds between two attempts
MOST = 4096  # maximum size of a note in bytes
FOREVER = float("inf")

BUSY = "another process is harvesting into {place}: {holder}. Wait for it (wait=True, --wait), or choose another place."
RANK = "process {rank} of this job is already harvesting into {place}: {holder}. Start each process of a job only once."


class NoLocks(Exception):  # never leaves this package
    """An error for a file system without locks."""


@dataclass(frozen=True)
class Holder:
    """A process that requests a lock: its job, its rank in the job, and its waiting time."""

    job: str | None = None
    rank: int | None = None
    wait: float = 0.0
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def note(self, *, holds: bool = True) -> bytes:
        """Return the note that other processes read."""
        said = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        return json.dumps({**said, **_process(os.getpid()), "job": self.job, "holds": holds}).encode()


def _process(pid: int) -> dict[str, str]:
    """Return the start time and the pid namespace of a process, because a pid alone may be reused."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
        began = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return {"space": "", "began": ""}
    return {"space": space, "began": began}


def _read(data: bytes) -> dict[str, Any]:
    try:
        note = json.loads(data[:MOST])
    except (ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def _named(note: dict[str, Any]) -> str:
    """Describe a holder for an error."""
    if not note.get("pid"):
        return "its process is unknown"
    return f"process {note['pid']!s:.20} on {note.get('host')!s:.100}, since {note.get('since')!s:.30}"


def _is_dead(note: dict[str, Any]) -> bool:
    """Return whether the process of a note ran on this machine and has ended."""
    pid = note.get("pid")
    if note.get("host") != socket.gethostname() or not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return False
    if note.get("space") != _process(os.getpid())["space"]:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return bool(note.get("began")) and _process(pid)["began"] != note["began"]


def _tries(wait: float) -> Iterator[bool]:
    """Yield whether there is time left, with a pause between attempts."""
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        yield True
        time.sleep(PAUSE * random.uniform(0.5, 1.5))  # noqa: S311  # so that two processes do not retry at the same time
    yield False


# -- directories ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def held_folder(root: Path, holder: Holder, first: Callable[[], object]) -> Iterator[None]:
    """Hold the lock of a directory. The first process of a job calls ``first`` before any other process can enter."""
    with contextlib.ExitStack() as stack:
        if holder.rank is not None:
            own = stack.enter_context(_opened(root / f"{LOCK}-rank{holder.rank}"))
            if not _locked(own, shared=False):
                raise StoreError(RANK.format(rank=holder.rank, place=root, holder=_named(_noted(own))))
            _write(own, holder.note())
        descriptor = stack.enter_context(_opened(root / LOCK))
        _take(descriptor, root, holder, first)
        try:
            yield
        finally:
            if holder.job is None or _locked(descriptor, shared=False):  # Only the last process of a job.
                _write(descriptor, b"")


def _take(descriptor: int, root: Path, holder: Holder, first: Callable[[], object]) -> None:
    began = time.monotonic()
    for has_time in _tries(max(holder.wait, GRACE if holder.job is not None else 0.0)):
        if _try(descriptor, holder, first):
            return
        note = _noted(descriptor)
        waits = time.monotonic() - began < holder.wait
        is_other = holder.job is not None and note.get("job") not in {None, holder.job} and not _is_dead(note)
        if not has_time or (not waits and (holder.job is None or is_other)):
            raise StoreError(BUSY.format(place=root, holder=_named(note)))


def _try(descriptor: int, holder: Holder, first: Callable[[], object]) -> bool:
    """Try to take the lock: exclusively, or shared with processes of the same job."""
    if _locked(descriptor, shared=False):
        _write(descriptor, holder.note())
        first()
        if holder.job is None:
            return True
    # Between the two kinds of lock another job may take it. A process that finds its note there backs off.
    if holder.job is None or not _locked(descriptor, shared=True):
        return False
    if _noted(descriptor).get("job") == holder.job:
        return True
    _unlock(descriptor)
    return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EISDIR}:
            raise StoreError(f"{path} must be the file of a lock, but is a link or a directory.") from error
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(descriptor: int, *, shared: bool) -> bool:
    try:
        import fcntl
    except ImportError as error:  # Not available on Windows.
        raise NoLocks from error
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}:
            raise NoLocks from error
        raise
    return True


def _unlock(descriptor: int) -> None:
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_UN)


def _noted(descriptor: int) -> dict[str, Any]:
    return _read(os.pread(descriptor, MOST, 0))


def _write(descriptor: int, note: bytes) -> None:
    with contextlib.suppress(OSError):  # On a full disk the lock still works. Only its note is missing.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note, 0)


# -- places without locks ---------------------------------------------------------------------------------------------


class Notes(Protocol):
    """The methods of a store place that notes use."""

    def read(self, name: str, most: int = ...) -> bytes: ...

    def write(self, name: str, data: bytes) -> None: ...

    def delete(self, name: str) -> None: ...

    def stamps(self, folder: str) -> dict[str, float]: ...


@contextlib.contextmanager
def held_by_note(place: Notes, holder: Holder) -> Iterator[None]:
    """Hold a lock with a note, which is updated as long as the lock is held."""
    name, done = f"{NOTES}/{holder.token}.json", threading.Event()
    _agree(place, name, holder)

    def beat() -> None:
        while not done.wait(BEAT):
            with contextlib.suppress(Exception):  # The next update may succeed.
                place.write(name, holder.note())

    thread = threading.Thread(target=beat, name="tenterhook-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(OSError):
            place.delete(name)


def _agree(place: Notes, name: str, holder: Holder) -> None:
    """Write a note, and check for the notes of other jobs.

    If two jobs write a note at the same time, the one with the smaller name wins.
    """
    began = time.monotonic()
    for has_time in _tries(max(holder.wait, GRACE)):
        place.write(name, holder.note(holds=False))
        other, other_note = _other(place, name, holder)
        if other is None:
            place.write(name, holder.note())
            return
        is_ours = not other_note.get("holds") and name < other  # The other one withdraws when it sees this note.
        if not is_ours:
            place.delete(name)
        if not has_time or (not is_ours and other_note.get("holds") and time.monotonic() - began >= holder.wait):
            place.delete(name)
            raise StoreError(BUSY.format(place=place, holder=_named(other_note)))


def _other(place: Notes, name: str, holder: Holder) -> tuple[str | None, dict[str, Any]]:
    """Return the first active note of another job."""
    stamps = place.stamps(NOTES)
    now = stamps.pop(name, max(stamps.values(), default=0.0))  # By the clock of the store, which is the same for all.
    for other, stamp in sorted(stamps.items()):
        try:
            note = _read(place.read(other, MOST))
        except FileNotFoundError:
            continue
        if holder.job is not None and note.get("job") == holder.job:
            continue
        if now - stamp > STALE or _is_dead(note):
            place.delete(other)
            continue
        return other, note
    return None, {}
