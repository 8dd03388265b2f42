"""The location of a store: a directory, or a prefix in an object store. Files are written atomically."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Container, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tenterhook._text import counted
from tenterhook.errors import StoreError
from tenterhook.store.lock import Holder, NoLocks, held_by_note, held_folder
from tenterhook.store.spool import Spool, remove_dead_spools

__all__ = ["COMMITS", "SHARDS", "Directory", "ObjectStore", "StorePlace", "place_of"]

TEMPORARY = ".tenterhook-"
SHARDS, COMMITS = "shards", "commits"
MOST = 64 << 20  # maximum size of a file that is read as a whole
TOO_LONG = (
    "{place}/{name} has {size:,} bytes, more than the limit of {most:,}: it is damaged, or not a file of tenterhook."
)
OUTSIDE = (
    "{place}/{name} is a link to {target}, outside of the store, which is not followed. Copy the file into the store."
)
NO_FILE = "{place}/{name} is not a file: it is a {kind}."


class StorePlace(Protocol):
    """The interface of a store's location. Names are relative paths with slashes."""

    def read(self, name: str, most: int = MOST) -> bytes: ...

    def read_range(self, name: str, start: int, stop: int) -> bytearray: ...

    def map(self, name: str, nbytes: int) -> Tensor | None: ...

    def size(self, name: str) -> int | None: ...

    def names(self, folder: str) -> list[str]: ...

    def write(self, name: str, data: bytes) -> None: ...

    def create(self, name: str, data: bytes) -> bool: ...

    def spool(self, name: str) -> Path: ...

    def publish(self, spooled: dict[str, Path]) -> None: ...

    def delete(self, name: str) -> None: ...

    def clear(self, name: str) -> None: ...

    def sweep(self, shards: Container[int] | None = None) -> int: ...

    def stamps(self, folder: str) -> dict[str, float]: ...

    def alone(self, holder: Holder | None = None) -> contextlib.AbstractContextManager[None]: ...


def place_of(where: str | os.PathLike[str] | Any, **options: Any) -> StorePlace:
    """Return a directory for a path, or an object store for a URL such as ``s3://bucket/acts`` or an obstore store."""
    if isinstance(where, Directory | ObjectStore):
        return where
    if isinstance(where, str) and "://" in where:
        return ObjectStore.at(where, **options)
    if isinstance(where, str | os.PathLike):
        return Directory(Path(where))
    if hasattr(where, "put"):  # A store of obstore.
        return ObjectStore(where, str(where))
    raise TypeError(f"a store must be a path, a URL or a store of obstore; got a {type(where).__name__}")


class Directory:
    """A local or shared directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: set[Path] = set()

    def __str__(self) -> str:
        return str(self.root)

    def __reduce__(self) -> Any:
        return Directory, (self.root,)

    def path(self, name: str) -> Path:
        """Return the path of a name. Refuse links that lead outside the root."""
        path = self.root / name
        real, root = os.path.realpath(path), os.path.realpath(self.root)
        if os.path.commonpath([real, root]) != root:
            raise StoreError(OUTSIDE.format(place=self, name=name, target=real))
        return path

    def _file(self, name: str) -> Path:
        """Return the path of a regular file. Reading a pipe could block, and a device may never end."""
        path = self.path(name)
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "directory" if stat.S_ISDIR(mode) else "device, pipe or socket"
            raise StoreError(NO_FILE.format(place=self, name=name, kind=kind))
        return path

    def read(self, name: str, most: int = MOST) -> bytes:
        """Read a whole file of at most ``most`` bytes."""
        with self._named_errors(name), self._file(name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise StoreError(TOO_LONG.format(place=self, name=name, size=size, most=most))
            return file.read(most)

    def map(self, name: str, nbytes: int) -> Tensor | None:
        """Return the bytes of a file as a private mapping.

        There is no copy and no open descriptor, and writes do not reach the file.
        """
        with self._named_errors(name):
            path = self._file(name)
            if path.stat().st_size < nbytes:
                raise StoreError(
                    f"{self}/{name} is damaged: it has {counted(path.stat().st_size, 'byte')}; {nbytes:,} were written."
                )
            return torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)

    def read_range(self, name: str, start: int, stop: int) -> bytearray:
        with self._named_errors(name), self._file(name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = bytearray(max(0, min(stop, size) - start))
            file.seek(start)
            count = file.readinto(data)
        return data[:count]

    def size(self, name: str) -> int | None:
        with self._named_errors(name):
            try:
                return self._file(name).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    @contextlib.contextmanager
    def _named_errors(self, name: str) -> Iterator[None]:
        """Convert read errors to ``StoreError``, except ``FileNotFoundError``."""
        try:
            yield
        except (StoreError, FileNotFoundError):
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise StoreError(f"{self}/{name} cannot be read: {error}") from error

    def names(self, folder: str) -> list[str]:
        """List every file below a folder, except hidden ones. Links are not followed."""
        top = self.path(folder)
        if top.exists() and not top.is_dir():
            raise StoreError(NO_FILE.format(place=self, name=folder, kind="file").replace("not a file", "not a folder"))
        found = []
        for at, folders, files in os.walk(top):
            folders[:] = [each for each in folders if not each.startswith(".")]
            found += [Path(at, file).relative_to(self.root).as_posix() for file in files if not file.startswith(".")]
        return sorted(found)

    def write(self, name: str, data: bytes) -> None:
        self.publish({name: self._written(name, data)})

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists, and return whether it was written. Of many processes, only one succeeds."""
        temporary = self._written(name, data)
        try:
            os.link(temporary, self.path(name))
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
        """Return a temporary name for writing a file before it is published."""
        folder = self.path(name).parent
        self.path(str(folder.relative_to(self.root)))
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{TEMPORARY}{Path(name).name}-{secrets.token_hex(8)}"

    def publish(self, spooled: dict[str, Path]) -> None:
        """Rename files that are synced to disk to their final names."""
        folders = set()
        for name, path in spooled.items():
            path.replace(self.root / name)
            folders.add((self.root / name).parent)
        for folder in folders:
            _sync(folder)
            if folder not in self._known:  # A new folder must also be synced in its parent.
                _sync(folder.parent)
                self._known.add(folder)

    def delete(self, name: str) -> None:
        """Delete a file, a link (not its target), or a folder of that name."""
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        _sync(path.parent)

    def clear(self, name: str) -> None:
        """Delete what blocks writing a file: links along its path, and anything at its name that is not a file."""
        path = self.root
        for part in Path(name).parts:
            path = path / part
            is_last = path == self.root / name
            if path.is_symlink() or (path.exists() and path.is_dir() == is_last):
                self.delete(str(path.relative_to(self.root)))

    def sweep(self, shards: Container[int] | None = None) -> int:
        """Delete the temporary files of killed processes, for these shards or all. No other process may write them."""
        if isinstance(shards, Collection):  # A full walk could visit very many other shards.
            found = [file for shard in shards for file in (self.root / SHARDS / f"{shard:08d}").glob(f"{TEMPORARY}*")]
            found += (self.root / COMMITS).glob(f"{TEMPORARY}*")
        else:
            found = [Path(at, file) for at, _, files in os.walk(self.root) for file in files]
            found = [file for file in found if file.name.startswith(TEMPORARY)]
        left = [file for file in found if shards is None or _shard_of(file) in shards]
        for file in left:
            file.unlink(missing_ok=True)
        return len(left)

    def stamps(self, folder: str) -> dict[str, float]:
        """Return the files of a folder with their modification times."""
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.path(folder)):
                with contextlib.suppress(FileNotFoundError):
                    found[f"{folder}/{entry.name}"] = entry.stat(follow_symlinks=False).st_mtime
        return {name: when for name, when in found.items() if name.endswith(".json")}

    @contextlib.contextmanager
    def alone(self, holder: Holder | None = None) -> Iterator[None]:
        """Hold the lock of the directory for one job. It is released when the process ends."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise StoreError(f"{self.root} is a file; a store is a directory.") from None
        holder = holder or Holder()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(held_folder(self.root, holder, self.sweep))
            except NoLocks:
                stack.enter_context(held_by_note(self, holder))
            yield


class ObjectStore:
    """A prefix in an object store, with obstore. Files are written to a temporary directory and uploaded whole."""

    def __init__(self, store: Any, text: str, url: str = "", options: dict[str, Any] | None = None) -> None:
        self.store, self._text, self._url, self._options = store, text, url, options or {}
        self._spool: Spool | None = None

    @classmethod
    def at(cls, url: str, **options: Any) -> ObjectStore:
        """Return the store of a URL. Credentials come from the options or from the environment."""
        try:
            from obstore.store import from_url
        except ImportError as error:
            text = f'{url} is in an object store, which needs obstore: pip install "tenterhook[store]"'
            raise ModuleNotFoundError(text) from error
        made: dict[str, Any] = {"mkdir": True} if url.startswith("file:") else {}
        return cls(from_url(url, **made, **options), url, url, options)

    def __str__(self) -> str:
        return self._text

    def __reduce__(self) -> Any:
        if self._url:
            return _again, (self._url, self._options)
        return ObjectStore, (self.store, self._text)

    def read(self, name: str, most: int = MOST) -> bytes:
        import obstore

        with self._named_errors(name):
            found = obstore.get(self.store, name)
            if found.meta["size"] > most:
                raise StoreError(TOO_LONG.format(place=self, name=name, size=found.meta["size"], most=most))
            return bytes(found.bytes())

    def map(self, name: str, nbytes: int) -> Tensor | None:  # noqa: ARG002
        return None  # Objects cannot be mapped.

    def read_range(self, name: str, start: int, stop: int) -> bytearray:
        import obstore

        if start == stop:
            return bytearray()
        with self._named_errors(name):  # A copy: tensors that share this memory must be writable.
            return bytearray(obstore.get_range(self.store, name, start=start, end=stop))

    def size(self, name: str) -> int | None:
        import obstore

        with self._named_errors(name):
            try:
                return int(obstore.head(self.store, name)["size"])
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _named_errors(self, name: str) -> Iterator[None]:
        """Convert errors to ``StoreError``, except ``FileNotFoundError``."""
        from obstore.exceptions import BaseError, NotFoundError

        try:
            yield
        except (StoreError, FileNotFoundError):
            raise
        except NotFoundError as error:
            raise FileNotFoundError(f"{self}/{name}") from error
        except (BaseError, OSError, ValueError) as error:
            raise StoreError(f"{self}/{name} cannot be read or written: {first_line(error)}") from error

    def names(self, folder: str) -> list[str]:
        import obstore

        with self._named_errors(folder):
            found = [entry["path"] for page in obstore.list(self.store, folder or None) for entry in page]
        return sorted(name for name in found if not any(part.startswith(".") for part in name.split("/")))

    def write(self, name: str, data: bytes) -> None:
        import obstore

        with self._named_errors(name):
            obstore.put(self.store, name, data)

    def create(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError

        try:
            obstore.put(self.store, name, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        except NotSupportedError:  # An old server. In a race, both processes may write.
            if self.size(name) is not None:
                return False
            self.write(name, data)
        except BaseError as error:
            raise StoreError(f"{self}/{name} cannot be written: {first_line(error)}") from error
        return True

    def spool(self, name: str) -> Path:
        if self._spool is None:
            self._spool = Spool()
        return self._spool.folder / f"{secrets.token_hex(8)}-{Path(name).name}"

    def publish(self, spooled: dict[str, Path]) -> None:
        import obstore

        for name, path in spooled.items():
            with self._named_errors(name):
                obstore.put(self.store, name, path)
            path.unlink()

    def delete(self, name: str) -> None:
        import obstore

        with self._named_errors(name), contextlib.suppress(FileNotFoundError):
            obstore.delete(self.store, name)

    def clear(self, name: str) -> None:
        """Do nothing: nothing can block writing an object."""

    def sweep(self, shards: Container[int] | None = None) -> int:  # noqa: ARG002
        return 0  # An incomplete upload creates no object.

    def stamps(self, folder: str) -> dict[str, float]:
        """Return the objects of a folder with their modification times."""
        import obstore

        with self._named_errors(folder):
            found = [entry for page in obstore.list(self.store, folder) for entry in page]
        return {entry["path"]: entry["last_modified"].timestamp() for entry in found}

    @contextlib.contextmanager
    def alone(self, holder: Holder | None = None) -> Iterator[None]:
        """Hold the lock of the prefix for one job, and delete temporary folders of killed processes on this machine."""
        remove_dead_spools()
        try:
            with held_by_note(self, holder or Holder()):
                yield
        finally:
            if self._spool is not None:
                self._spool.close()
                self._spool = None


def _shard_of(file: Path) -> int:
    """Return the shard of a temporary file from its folder or its name, or -1."""
    own = file.name.removeprefix(TEMPORARY).partition(".")[0]
    return next((int(text) for text in (file.parent.name, own) if text.isdecimal()), -1)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text. obstore appends the whole chain of causes."""
    return str(error).split("\n", 1)[0]


def _again(url: str, options: dict[str, Any]) -> ObjectStore:
    return ObjectStore.at(url, **options)


def _sync(path: Path) -> None:
    with contextlib.suppress(OSError):  # Not every system can sync a directory.
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
