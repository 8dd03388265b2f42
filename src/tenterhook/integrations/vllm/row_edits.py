"""Ready edits, applied to the rows of one request."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from tenterhook._tree import describe, map_tensors, tensors
from tenterhook.address.grammar import CallRange, parse
from tenterhook.edit.change import as_change
from tenterhook.edit.ready import Add, Edit, Mean, Noise
from tenterhook.edit.saved import decode_edits, encode_edits
from tenterhook.edit.skip import Skip
from tenterhook.errors import EditError
from tenterhook.integrations.vllm.messages import pack, unpack
from tenterhook.integrations.vllm.token_rows import TokenRows, token_rows

__all__ = ["EditData", "RowEdit", "edit_data", "row_edits"]

ROWS = (2, 3)
"""numbers of rows that an edit is tried on; it must not depend on them"""
BATCHED = (
    "{address!r}: {edit!r} cannot be applied per request: {why}. Edits of an engine change each token's row by itself: "
    "zero, set, add, scale, clamp, project, rotate, lowrank, mask, and mean over dim=-1."
)
NO_DICT = (
    "edits are a dict of address to ready edit, such as {{'model.layers.9@resid': th.add(vector)}}, or the result of "
    "th.load_edits(path); got {given!r:.80}"
)
CALLS = "a call may be skipped for all requests or for none. To remove what a part adds, use th.zero() at its output"
FUNCTIONS = "{address!r}: a function is code, and only data is sent to the workers of an engine. Use ready edits."
ROW_COUNT = (
    "{address!r}: {edit!r} has {rows} rows, one for each token. at= must name as many tokens: at=th.at[{first}:{last}]"
)


class EditPlace(NamedTuple):
    """The information for a ready edit: the address and the call, for its error messages."""

    address: str
    call: int = 0


class EditData(dict[str, Any]):
    """Edits in the form in which they travel with a request: JSON text, tensors as bytes, and a digest of both."""

    rows: tuple[tuple[str, TokenRows], ...] = ()
    """for each of the edits its address, and the tokens that it changes"""

    def __deepcopy__(self, _memo: object) -> EditData:
        return self  # vLLM copies the sampling parameters of each request, and nothing changes this.

    @property
    def digest(self) -> str:
        """A name for the content."""
        return str(self["digest"])


@dataclass
class RowEdit:
    """One ready edit at one address."""

    address: str
    edit: Edit
    rows: TokenRows
    operand: Tensor | None = None
    """a tensor with a row for each chosen token; None if all tokens get the same"""

    @functools.cached_property
    def vector(self) -> Tensor | None:
        """The vector that is added to every row, if the edit does just that. Such edits are applied together."""
        edit = self.edit
        if type(edit) is not Add or not isinstance(edit.value, Tensor) or edit.value.dim() != 1:
            return None
        if edit.at is not None or edit.part is not None or not self.rows.all:
            return None
        return edit.value if edit.scale == 1 else edit.value * edit.scale

    def apply(self, value: Any, position: int, prompt: int) -> Iterator[tuple[Any, Any]]:
        """Yield the index of the changed rows, and their new value, for the rows of one request."""
        count = len(next(tensor for _, tensor in tensors(value)))
        chosen = self.rows.choose(position, position + count, prompt)
        if chosen is not None:
            index, numbers = chosen
            yield index, self.change(map_tensors(lambda tensor: tensor[index], value), numbers)

    def change(self, value: Any, numbers: list[int] | range) -> Any:
        """Return the new value of the chosen rows."""
        edit = self.edit
        if self.operand is not None and edit.operand is not None:
            edit = replace(edit, **{edit.operand: self.operand[list(numbers)]})
        return edit(value, EditPlace(self.address))  # type: ignore[arg-type]


def edit_data(edits: Mapping[Any, Any]) -> EditData:
    """Return edits as data, or raise EditError if they cannot be applied per request."""
    if not edits or not isinstance(edits, Mapping):
        raise EditError(NO_DICT.format(given=edits))
    for address, given in edits.items():
        for edit in given if isinstance(given, list | tuple) else [given]:
            _refuse_code(str(address), edit)
    text, held = encode_edits(edits)
    data = pack(held)
    digest = hashlib.sha256(text.encode() + b"\0" + data).hexdigest()[:32]
    made = EditData(edits=text, tensors=data, digest=digest)
    made.rows = tuple(
        (edit.address, edit.rows) for _, edit in _described(made)
    )  # This raises here, and not in a worker.
    return made


def _refuse_code(address: str, edit: Any) -> None:
    """Raise EditError for anything but a ready edit."""
    if not isinstance(edit, Edit):
        try:
            as_change(edit)
        except EditError as error:
            raise EditError(f"{address!r}: {error}") from None
        raise EditError(FUNCTIONS.format(address=address))


def row_edits(data: Mapping[str, Any], like: Tensor | None = None) -> dict[str, list[RowEdit]]:
    """Return the edits by the address of their point, without its call.

    Tensors get the dtype and device of ``like``.
    """
    found: dict[str, list[RowEdit]] = {}
    for base, edit in _described(data, like):
        found.setdefault(base, []).append(edit)
    return found


def _described(data: Mapping[str, Any], like: Tensor | None = None) -> Iterator[tuple[str, RowEdit]]:
    device, dtype = (None, None) if like is None else (like.device, like.dtype)
    decoded = decode_edits(data["edits"], unpack(data["tensors"]), device=device, dtype=dtype)
    for text, given in decoded.items():
        address = parse(text)
        base = str(replace(address, call=None))
        for edit in given if isinstance(given, list) else [given]:
            yield base, _row_edit(base, edit, address.call)


def _row_edit(address: str, edit: Edit, call: int | CallRange | None) -> RowEdit:
    _refuse_across_rows(address, edit)
    rows, rest = token_rows(edit.at, call, address)
    given = getattr(edit, edit.operand) if edit.operand is not None else None
    alone = replace(edit, at=rest)
    if isinstance(given, Tensor) and given.dim() > 1 and len(given) > 1:
        if rows.count != len(given):
            text = ROW_COUNT.format(address=address, edit=edit, rows=len(given), first=0, last=len(given))
            raise EditError(text)
        return RowEdit(address, alone, rows, given)
    return RowEdit(address, alone, rows)


def _refuse_across_rows(address: str, edit: Edit) -> None:
    why = ""
    if isinstance(edit, Skip):
        why = CALLS
    elif isinstance(edit, Noise):
        why = "its random numbers would depend on the other requests of a batch"
    elif isinstance(edit, Mean):
        dims = edit.dim if isinstance(edit.dim, tuple) else (edit.dim,)
        why = "it is a mean over tokens, and the tokens of a request are computed in parts" if {*dims} - {-1, 1} else ""
    if why:
        raise EditError(BATCHED.format(address=address, edit=edit, why=why))


def try_edit(edit: RowEdit, value: Any) -> None:
    """Raise EditError if an edit does not fit the value at its point, given with at least one row."""
    for count in ROWS if edit.operand is None else (len(edit.operand),):
        blank = map_tensors(functools.partial(_rows_like, count), value)
        try:
            new = edit.change(blank, range(count))
        except (TypeError, ValueError, RuntimeError, LookupError) as error:
            if isinstance(error, EditError):
                raise
            text = f"{edit.address!r}: {edit.edit!r} does not fit {describe(blank)}: {error}"
            raise EditError(text) from error
        before, after = dict(tensors(blank)), dict(tensors(new))
        if before.keys() != after.keys() or any(after[path].shape != old.shape for path, old in before.items()):
            raise EditError(f"{edit.address!r}: {edit.edit!r} turned {describe(blank)} into {describe(new)}")


def _rows_like(count: int, tensor: Tensor) -> Tensor:
    return tensor[:1].expand(count, *tensor.shape[1:]).clone()
