"""Files of ready edits: text and safetensors without code, so that an intervention can be shared.

The header has these entries beside the tensors ``t0``, ``t1``, …:

``format``, ``format_version``
    ``tenterhook.edits`` and the version of this layout.
``edits``
    JSON: for each address a list of edits, each with the name of a ready edit and its fields. It also has the true
    dtypes of tensors that are stored under another dtype.
``notes``
    JSON: the author's notes, such as the name of the model.
``checksum``
    A checksum of the whole content, as in a tape file.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tenterhook._tree import CONSTANTS, parts_of
from tenterhook.address import Point, Selection
from tenterhook.address.grammar import parse
from tenterhook.edit.ready import Add, Clamp, Edit, Lowrank, Mask, Mean, Noise, Project, Rotate, Scale, Set, Zero
from tenterhook.edit.skip import Skip
from tenterhook.errors import AddressError, EditFileError, TapeFileError

__all__ = ["READY", "Edits", "decode_edits", "encode_edits", "load_edits", "save_edits"]

FORMAT, FORMAT_VERSION = "tenterhook.edits", 1
READY: dict[str, type[Edit]] = {
    kind.__name__.lower(): kind
    for kind in (Add, Clamp, Lowrank, Mask, Mean, Noise, Project, Rotate, Scale, Set, Skip, Zero)
}
NUMBER = (int, float, type(None))
LEARNED = (Tensor, type(None))
RANK = (int, type(None))
# The types that a field may have, where they are restricted. A file with another type was not written by save_edits.
FIELDS: dict[tuple[str, str], tuple[type, ...]] = {
    ("add", "scale"): (int, float),
    ("clamp", "max"): NUMBER,
    ("clamp", "min"): NUMBER,
    ("lowrank", "bias"): LEARNED,
    ("lowrank", "down"): LEARNED,
    ("lowrank", "rank"): RANK,
    ("lowrank", "up"): LEARNED,
    ("mask", "keep"): (Tensor,),
    ("mean", "dim"): (int, tuple),
    ("noise", "seed"): (int,),
    ("noise", "std"): (int, float),
    ("project", "directions"): (Tensor,),
    ("project", "remove"): (bool,),
    ("rotate", "directions"): LEARNED,
    ("rotate", "rank"): RANK,
    ("scale", "factor"): (int, float, complex, Tensor),
}
ELLIPSIS = ["ellipsis"]
SEQUENCES = (tuple, list)

NO_CODE = (
    "the edit at {address!r} is {what}, which is code. A file of edits cannot store code.\n"
    "Use ready edits ({ready}), or share the function as source code."
)
NO_SELECTOR = (
    "{key!r:.80} is an object of this process, and a file of edits stores text only.\n"
    "Use an address, a glob such as 'h.*.mlp', or the result of th.points(model, …)."
)


class Edits(dict[str, Any]):
    """A dict of edits in the form that ``th.edit`` takes, with the notes from the file as ``.notes``."""

    def __init__(self, edits: Mapping[str, Any] = {}, notes: Mapping[str, Any] = {}) -> None:
        super().__init__(edits)
        self.notes = dict(notes)


def save_edits(
    path: str | os.PathLike[str], edits: Mapping[Any, Any], *, notes: Mapping[str, Any] | None = None
) -> None:
    """Write ready edits to one file. The file is complete, or it is not written.

    >>> import os, tempfile, torch, tenterhook as th
    >>> path = os.path.join(tempfile.mkdtemp(), "calm.edits")
    >>> th.save_edits(path, {"h.6": th.add(torch.ones(4), scale=3.0)}, notes={"model": "gpt2"})
    >>> th.load_edits(path)
    {'h.6': th.add(value=float32[4], scale=3.0)}

    Args:
        path: the file to write. An existing file is replaced; if the write fails, it stays unchanged.
        edits: a dict as for ``th.edit``, with ready edits only: address or glob to an edit or a list of edits.
        notes: further information as a dict of plain JSON values. By default, the notes of ``edits`` if
            ``load_edits`` returned them.

    Raises:
        EditFileError: an edit is a function or holds a value that the file cannot store, or the write failed.
    """
    from tenterhook.record.tensor_file import target_of, write  # Loads safetensors only when needed.

    target = target_of(_kind(), path)
    text, tensors = encode_edits(edits)
    texts = {"edits": text, "notes": _noted(getattr(edits, "notes", {}) if notes is None else notes)}
    write(_kind(), target, tensors, texts)


def encode_edits(edits: Mapping[Any, Any]) -> tuple[str, dict[str, Tensor]]:
    """Return ready edits as JSON text, and the tensors that it names."""
    from tenterhook.record.encode_values import Encoder

    encoder = Encoder()
    described = [
        [address, [_described(edit, address, encoder) for edit in _listed(given)]] for address, given in _items(edits)
    ]
    return json.dumps({"edits": described, "views": encoder.views}, separators=(",", ":")), encoder.tensors


def load_edits(
    path: str | os.PathLike[str], *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Edits:
    """Read edits that ``th.save_edits`` wrote. No code from the file is executed.

    ``with th.edit(model, th.load_edits("calm.edits")): …`` applies them. ``.notes`` has the author's notes.

    Args:
        path: the file.
        device: the device for the tensors. The default is the CPU.
        dtype: the dtype to convert floating-point tensors to, such as the model's own. By default they keep theirs.

    Returns:
        An :class:`Edits` dict for ``th.edit``.

    Raises:
        EditFileError: the file is missing, is not a file of edits, or is damaged.
    """
    from tenterhook.record.tensor_file import MALFORMED, read

    file = Path(path)
    texts, tensors = read(_kind(), file)
    try:
        found = decode_edits(texts["edits"], tensors, device=device, dtype=dtype)
        notes = json.loads(texts["notes"])
        if not isinstance(notes, dict):
            raise TypeError("its notes are not a dict")
    except (*MALFORMED, RecursionError) as error:
        raise EditFileError(f"{file} is malformed: {type(error).__name__}: {error}") from error
    return Edits(found, notes)


def decode_edits(
    text: str,
    tensors: Mapping[str, Tensor],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Return the edits of :func:`encode_edits`. A malformed text raises ValueError, TypeError or a similar error."""
    from tenterhook.record.decode_values import Decoder, restore

    described = json.loads(text)
    true = {**tensors, **{name: restore(tensors[name], stored) for name, stored in described["views"].items()}}
    decode = Decoder({name: _moved(tensor, device, dtype) for name, tensor in true.items()}).decode
    return {_address(key): _made(edits, decode) for key, edits in described["edits"]}


def _kind() -> Any:
    from tenterhook.record.tensor_file import FileKind

    one, no = "a set of edits", "not a set of edits"
    return FileKind(FORMAT, FORMAT_VERSION, one, no, "run.edits", EditFileError)


# -- write -------------------------------------------------------------------------------------------------------------


def _items(edits: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(edits, Mapping):
        raise EditFileError(f"edits are a dict of address to edit, such as {{'h.3': th.zero()}}; got {edits!r:.80}")
    for key, given in edits.items():
        if isinstance(key, str):
            yield _address(key), given
        elif isinstance(key, Point):
            yield str(key), given
        elif isinstance(key, Selection):
            yield from ((str(point), given) for point in key)
        else:
            raise EditFileError(NO_SELECTOR.format(key=key))


def _address(text: str) -> str:
    try:
        parse(text)
    except AddressError as error:
        raise EditFileError(f"{text!r:.80} is not an address: {error}") from error
    return text


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _described(edit: Any, address: str, encoder: Any) -> list[Any]:
    name = type(edit).__name__.lower()
    if READY.get(name) is not type(edit):
        raise EditFileError(_why_not(edit, address))
    fields = {field.name: getattr(edit, field.name) for field in dataclasses.fields(edit)}
    for field, value in fields.items():
        for wrong in _opaque(value):
            text = f"{field}= of the edit {name} at {address!r} has a {type(wrong).__name__}"
            raise EditFileError(f"{text}, which a file of edits cannot store. Use a tensor or plain numbers.")
    try:
        return [name, {field: _written(value, address, encoder) for field, value in fields.items()}]
    except TapeFileError as error:
        raise EditFileError(f"the edit {name} at {address!r} cannot be saved: {error}") from error


def _why_not(edit: Any, address: str) -> str:
    if isinstance(edit, Edit):
        what = f"a {type(edit).__name__}, an edit of your own"
    elif callable(edit):
        what = f"the function {getattr(edit, '__qualname__', type(edit).__name__)}"
    else:
        return f"the edit at {address!r} is a {type(edit).__name__}, not a ready edit ({', '.join(READY)})."
    return NO_CODE.format(address=address, what=what, ready=", ".join(READY))


def _opaque(value: Any, *, index: bool = True) -> Iterator[Any]:
    """Yield the parts of a value that cannot be stored. An ellipsis can be stored inside an index."""
    if isinstance(value, slice):
        parts: Any = [(0, value.start), (1, value.stop), (2, value.step)]
    elif isinstance(value, (Tensor, *CONSTANTS)) or (index and value is Ellipsis):
        return
    else:
        parts = parts_of(value)
    if parts is None:
        yield value
    for _, part in parts or ():
        yield from _opaque(part, index=index and type(value) in SEQUENCES)


def _written(value: Any, address: str, encoder: Any) -> Any:
    """Return a field as JSON. The tape encoder has no ellipsis, so this function writes the sequences around one."""
    if value is Ellipsis:
        return ELLIPSIS
    if type(value) in SEQUENCES:
        return [type(value).__name__, [_written(part, address, encoder) for part in value]]
    return encoder.encode(value, address)


def _noted(notes: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(notes), separators=(",", ":"))
    except (TypeError, ValueError) as error:
        text = f"notes= cannot be written as JSON: {error}. Use text, numbers, lists and dicts only."
        raise EditFileError(text) from None


# -- read --------------------------------------------------------------------------------------------------------------


def _made(described: Any, decode: Callable[[Any], Any]) -> Any:
    edits = [_edit(name, fields, decode) for name, fields in described]
    return edits[0] if len(edits) == 1 else edits


def _edit(name: str, fields: dict[str, Any], decode: Callable[[Any], Any]) -> Edit:
    kind = READY[name]
    values = {field: _field(value, decode) for field, value in fields.items()}
    known = {field.name for field in dataclasses.fields(kind)}
    if values.keys() != known:
        raise ValueError(f"{name} has the fields {', '.join(sorted(known))}; got {', '.join(sorted(values))}")
    for field, value in values.items():
        allowed = FIELDS.get((name, field))
        if allowed is not None and (not isinstance(value, allowed) or (type(value) is bool and bool not in allowed)):
            raise TypeError(f"{field}= of {name} cannot be a {type(value).__name__}")
    return kind(**values)


def _field(value: Any, decode: Callable[[Any], Any]) -> Any:
    if value == ELLIPSIS:
        return ...
    if isinstance(value, list) and value[0] in ("tuple", "list"):
        parts = [_field(part, decode) for part in value[1]]
        return tuple(parts) if value[0] == "tuple" else parts
    return decode(value)


def _moved(tensor: Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(device=device, dtype=dtype if dtype is not None and tensor.is_floating_point() else None)
