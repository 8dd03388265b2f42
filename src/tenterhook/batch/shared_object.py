"""A stand-in for an object that a batch returns and that has no part for each case, such as a key-value cache."""

from __future__ import annotations

from typing import Any, NoReturn

from tenterhook._text import printable
from tenterhook._tree import map_tensors
from tenterhook.errors import BatchError

__all__ = ["NotSeparated", "SharedObject", "without_shared_objects"]

TEXT = (
    "a {kind} in the output is that of the whole batch, and has no part for each case. Run the cases one at a time, "
    "with batch=1, or read tensors."
)


class NotSeparated(BatchError):
    """The object of a whole batch was used for one case."""


class SharedObject:
    """A stand-in that raises wherever it is used. In its place, the object would show the values of other cases."""

    def __init__(self, given: Any) -> None:
        self._kind = type(given).__name__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python, copy and pickle look for optional methods.
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, _key: Any) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:  # noqa: PLE0303  It has none.
        self._refuse()

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        self._refuse()

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return printable(f"<{self.__dict__.get('_kind')} of the whole batch, not kept>")

    def _refuse(self) -> NoReturn:
        raise NotSeparated(TEXT.format(kind=self.__dict__.get("_kind")))


def without_shared_objects(output: Any) -> Any:
    """Return the output of a batch with a stand-in for each object that is not a structure of tensors."""
    return map_tensors(lambda tensor: tensor, output, opaque=SharedObject)
