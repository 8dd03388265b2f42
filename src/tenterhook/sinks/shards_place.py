"""Where a store is: a directory, or a prefix in an object store. Whatever is written is there whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Container, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tenterhook.errors import StoreError

__all__ = ["COMMITS", "SHARDS", "Directory", "ObjectStore", "Place", "place_of"]

TEMPORARY = ".tenterhook-"
SHARDS, COMMITS = "shards", "commits"


class Place(Protocol):
    """What a store asks of where it is. Names are relative, with slashes."""

    def read(self, name: str) -> bytes: ...

    def read_range(self, name: str, start: int, stop: int) -> bytearray: ...

    def map(self, name: str, nbytes: int) -> Tensor | None: ...

    def size(self, name: str) -> int | None: ...

    def names(self, folder: str) -> list[str]: ...

    def write(self, name: str, data: bytes) -> None: ...

    def create(self, name: str, data: bytes) -> bool: ...

    def spool(self, name: str) -> Path: ...

    def publish(self, spooled: dict[str, Path]) -> None: ...

    def delete(self, name: str) -> None: ...

    def sweep(self, shards: Container[int] | None = None) -> int: ...

    def alone(self) -> contextlib.AbstractContextManager[None]: ...


def place_of(where: str | os.PathLike[str] | Any, **options: Any) -> Place:
    """A directory for a path, an object store for a URL such as ``s3://bucket/acts`` or for a store of obstore."""
    if isinstance(where, Directory | ObjectStore):
        return where
    if isinstance(where, str) and "://" in where:
        return ObjectStore.at(where, **options)
    if isinstance(where, str | os.PathLike):
        return Directory(Path(where))
    if hasattr(where, "put"):  # A store that the caller made.
        return ObjectStore(where, str(where))
    raise TypeError(f"a store is a path, a URL or a store of obstore; got a {type(where).__name__}")


class Directory:
    """A directory of this machine, or of one that all machines see."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: set[Path] = set()

    def __str__(self) -> str:
        return str(self.root)

    def __reduce__(self) -> Any:
        return Directory, (self.root,)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def map(self, name: str, nbytes: int) -> Tensor | None:
        """The bytes of a file, mapped: nothing is copied, no descriptor is held, and no change reaches the file."""
        return torch.from_file(str(self.root / name), shared=False, size=nbytes, dtype=torch.uint8)

    def read_range(self, name: str, start: int, stop: int) -> bytearray:
        data = bytearray(stop - start)
        with (self.root / name).open("rb") as file:
            file.seek(start)
            count = file.readinto(data)
        return data[:count]

    def size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """Every file below a folder, but for those that are being written, and the lock."""
        found = [file for file in (self.root / folder).rglob("*") if file.is_file()]
        return sorted(str(file.relative_to(self.root)) for file in found if not file.name.startswith("."))

    def write(self, name: str, data: bytes) -> None:
        self.publish({name: self._written(name, data)})

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it is there: of many processes, one does."""
        temporary = self._written(name, data)
        try:
            os.link(temporary, self.root / name)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        _sync((self.root / name).parent)
        return True

    def _written(self, name: str, data: bytes) -> Path:
        temporary = self.spool(name)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return temporary

    def spool(self, name: str) -> Path:
        """A name to write to before the file is put in its place."""
        folder = (self.root / name).parent
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{TEMPORARY}{Path(name).name}-{secrets.token_hex(8)}"

    def publish(self, spooled: dict[str, Path]) -> None:
        """Put files, which the disk has, in their places."""
        folders = set()
        for name, path in spooled.items():
            path.replace(self.root / name)
            folders.add((self.root / name).parent)
        for folder in folders:
            _sync(folder)
            if folder not in self._known:  # It may be new, and is then known to the disk by what is above it.
                _sync(folder.parent)
                self._known.add(folder)

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)
        _sync((self.root / name).parent)

    def sweep(self, shards: Container[int] | None = None) -> int:
        """Remove what a killed process left half-written, of these shards or of all; nobody else may write them."""
        if isinstance(shards, Collection):  # Not through all the others: there may be very many of them.
            found = [file for shard in shards for file in (self.root / SHARDS / f"{shard:08d}").glob(f"{TEMPORARY}*")]
            found += (self.root / COMMITS).glob(f"{TEMPORARY}*")
        else:
            found = [*self.root.rglob(f"{TEMPORARY}*")]
        left = [file for file in found if shards is None or _shard_of(file) in shards]
        for file in left:
            file.unlink(missing_ok=True)
        return len(left)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the directory for one harvest at a time. A process that dies lets go of it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise StoreError(f"{self.root} is a file; a store is a directory.") from None
        try:
            import fcntl
        except ImportError:  # There is none on Windows.
            yield
            return
        descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"another process is harvesting into {self.root}; wait for it, or choose another place."
                raise StoreError(text) from None
            yield
        finally:
            os.close(descriptor)


class ObjectStore:
    """A prefix in an object store, by obstore. Files are made in a temporary directory and put whole."""

    def __init__(self, store: Any, text: str, url: str = "", options: dict[str, Any] | None = None) -> None:
        self.store, self._text, self._url, self._options = store, text, url, options or {}
        self._scratch: Path | None = None

    @classmethod
    def at(cls, url: str, **options: Any) -> ObjectStore:
        """The store behind a URL; its credentials come from the options or from the environment."""
        try:
            from obstore.store import from_url
        except ImportError as error:
            text = f'{url} is in an object store, for which obstore is needed: pip install "tenterhook[store]"'
            raise ModuleNotFoundError(text) from error
        made: dict[str, Any] = {"mkdir": True} if url.startswith("file:") else {}
        return cls(from_url(url, **made, **options), url, url, options)

    def __str__(self) -> str:
        return self._text

    def __reduce__(self) -> Any:
        if self._url:
            return _again, (self._url, self._options)
        return ObjectStore, (self.store, self._text)

    def read(self, name: str) -> bytes:
        import obstore

        return bytes(obstore.get(self.store, name).bytes())

    def map(self, name: str, nbytes: int) -> Tensor | None:  # noqa: ARG002
        return None  # It has to be read.

    def read_range(self, name: str, start: int, stop: int) -> bytearray:
        import obstore

        if start == stop:
            return bytearray()
        # Into memory of our own: tensors that share it must be able to be written to.
        return bytearray(obstore.get_range(self.store, name, start=start, end=stop))

    def size(self, name: str) -> int | None:
        import obstore

        try:
            return int(obstore.head(self.store, name)["size"])
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        import obstore

        found = [entry["path"] for page in obstore.list(self.store, folder or None) for entry in page]
        return sorted(name for name in found if not any(part.startswith(".") for part in name.split("/")))

    def write(self, name: str, data: bytes) -> None:
        import obstore

        obstore.put(self.store, name, data)

    def create(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        try:
            obstore.put(self.store, name, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        except NotSupportedError:  # An old server: the loser of a race then reads what the winner wrote, or its own.
            if self.size(name) is not None:
                return False
            self.write(name, data)
        return True

    def spool(self, name: str) -> Path:
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="tenterhook-"))
        return self._scratch / f"{secrets.token_hex(8)}-{Path(name).name}"

    def publish(self, spooled: dict[str, Path]) -> None:
        import obstore

        for name, path in spooled.items():
            obstore.put(self.store, name, path)
            path.unlink()

    def delete(self, name: str) -> None:
        import obstore

        obstore.delete(self.store, name)

    def sweep(self, shards: Container[int] | None = None) -> int:  # noqa: ARG002
        return 0  # An object that was not put whole is not there.

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Two harvests into one prefix write the same bytes under the same names; only their work is doubled."""
        try:
            yield
        finally:
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
                self._scratch = None


def _shard_of(file: Path) -> int:
    """The shard that a half-written file belongs to, or -1: its folder or its own name says it."""
    own = file.name.removeprefix(TEMPORARY).partition(".")[0]
    return next((int(text) for text in (file.parent.name, own) if text.isdecimal()), -1)


def _again(url: str, options: dict[str, Any]) -> ObjectStore:
    return ObjectStore.at(url, **options)


def _sync(path: Path) -> None:
    with contextlib.suppress(OSError):  # Not every system can sync a directory.
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
