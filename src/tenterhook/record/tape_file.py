"""The tape file: a safetensors file, which any reader of that format opens, with all other data as JSON in its header.

The header has these entries beside the tensors ``t0``, ``t1``, …:

``format``, ``format_version``
    ``tenterhook.tape`` and the version of this layout.
``tenterhook``, ``torch``
    The versions that wrote the file.
``tape``
    JSON: the values and the gradients, track by track, with every structure as ``Encoder`` writes it; the other names
    of shared modules; and the true dtypes of tensors that are stored under another dtype. A track inside a ``forward``
    has its file, its line and that line's source. ``order`` has the positions of a track's calls in the order in which
    the values of the tape were produced. Files of earlier versions have no ``order``.
``notes``
    JSON, optional: other facts about the run.
``checksum``
    xxh3_128 of the tensors and of all the other texts. safetensors detects a truncated file, but not a flipped bit.
"""

# This module uses private attributes of Tape, because the public interface reads by address only.

from __future__ import annotations

import json
import linecache
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from tenterhook._tree import tensors as tensors_in
from tenterhook.address.grammar import escape, parse
from tenterhook.address.walk import all_names, named_tensors, true_names, walk
from tenterhook.errors import TapeFileError
from tenterhook.record.decode_values import Decoder, restore
from tenterhook.record.encode_values import Encoder
from tenterhook.record.kept_value import KeptValue
from tenterhook.record.recorded_gradients import WHY, GradientSlot
from tenterhook.record.tape import Tape, TapeView, Track
from tenterhook.record.tape_log import LogEntries
from tenterhook.record.tensor_file import MALFORMED, FileKind, read, replacing, target_of, write

__all__ = ["load", "replacing", "save", "source_of"]

TAPE = FileKind("tenterhook.tape", 1, "a tape", "not a tape", "run.th", TapeFileError)
MOST_CALLS = 2**62
MODEL_NOTE = {"name": str, "class": str, "modules": int, "parameters": int}


def save(tape: Tape, path: str | os.PathLike[str]) -> None:
    """Write a tape to one file. The file is complete, or an existing file stays unchanged.

    Tensors are stored contiguous, from any device. Gradients are stored in their present state.
    """
    target = target_of(TAPE, path)
    encoder, tracks = Encoder(), list(tape._tracks)  # The tracks of some tapes, and their log, are made here.
    places = tape.log.places() if tape.log.ordered else None
    described = {
        "values": [_describe(tape, address, encoder) | _placed(tape, address, places) for address in tracks],
        "gradients": [_describe(tape.grad, address, encoder) for address in tape.grad._tracks],
        "aliases": _aliases(tape),
        "views": encoder.views,
    }
    texts = {"tape": json.dumps(described, separators=(",", ":"))}
    if tape.notes:
        texts["notes"] = _noted(tape.notes)
    write(TAPE, target, encoder.tensors, texts)


def load(path: str | os.PathLike[str]) -> Tape:
    """Read a tape that ``tape.save`` wrote. Its tensors are on the CPU.

    >>> import tempfile, torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> with th.record(model, "1") as tape, tempfile.TemporaryDirectory() as folder:
    ...     output = model(torch.ones(4, 2))
    ...     tape.save(f"{folder}/run.th")
    ...     again = load(f"{folder}/run.th")
    >>> torch.equal(again["1"], output)
    True

    No code from the file is executed. Named tuples, dataclasses and mappings get their own class back if this process
    has loaded it. Otherwise they get a class with the same name and fields, and a mapping becomes a dict.
    """
    file = Path(path)
    texts, tensors = read(TAPE, file)
    try:
        tape = _tape(json.loads(texts["tape"]), tensors)
        tape.notes.update(_notes(json.loads(texts.get("notes", "{}"))))
    except MALFORMED as error:
        raise TapeFileError(f"{file} is malformed: {type(error).__name__}: {error}") from error
    return tape


# -- write -------------------------------------------------------------------------------------------------------------


def _describe(view: TapeView, address: str, encoder: Encoder) -> dict[str, Any]:
    """Return one track as JSON data: the value of each call, and for a missing gradient the reason."""
    track = view._tracks[address]
    calls, missing = [], []
    found = sorted(track.entries.items())
    for index, entry in found:
        name = address if len(found) == 1 else f"{address}#{index}"
        if view._held(entry):
            calls.append([index, encoder.encode(view._read(entry, name), name)])
        else:
            missing.append([index, entry.why])
    described = {"address": address, "kind": track.kind, "site": track.site, "calls": calls, "missing": missing}
    source: dict[str, Any] = {}
    if track.where:
        source = {"where": track.where, "lines": list(track.lines), "source": list(source_of(track))}
    if track.numbers is not None:
        source |= {"places": track.places, "numbers": sorted(map(list, track.numbers.items()))}
    return described | source


def _placed(tape: Tape, address: str, places: dict[int, int] | None) -> dict[str, Any]:
    """Return the positions of a track's calls in the order of recording, if it is known."""
    entries: Any = tape._tracks[address].entries
    return {} if places is None else {"order": [places[entries.base + index] for index in sorted(entries)]}


def _noted(notes: dict[str, Any]) -> str:
    try:
        return json.dumps(notes, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TapeFileError(
            f"tape.notes cannot be written as JSON: {error}. Use text, numbers, lists and dicts only."
        ) from None


def source_of(track: Track) -> tuple[str, ...]:
    """Return the source lines where a value inside a ``forward`` is computed, as saved or in their present form."""
    file = track.where.rpartition(":")[0]
    return track.source or tuple(linecache.getline(file, line).strip() for line in track.lines)


def _aliases(tape: Tape) -> dict[str, str]:
    """Return the other addresses of what is on the tape, each with the address that was recorded."""
    found = dict(tape._aliases)
    model = tape._model()
    if model is None:
        return found
    objects: dict[str, Any] = {}
    for names in (true_names(model), all_names(walk(model))):  # A plain name wins over one with a wrapper's prefix.
        objects |= dict(names) | {entry.full: entry.tensor for entry in named_tensors(names)}
    paths: dict[int, list[str]] = {}
    for path, thing in objects.items():
        paths.setdefault(id(thing), []).append(path)
    for address in tape._tracks or tape.grad._tracks:
        own = ".".join(parse(address).names or ())
        tail = address[len(escape(own)) :].removeprefix(":return")
        others = [path for path in paths.get(id(objects.get(own)), ()) if path != own]
        found.update({escape(path) + tail or ":return": address for path in others})
    return found


# -- read --------------------------------------------------------------------------------------------------------------


def _tape(described: dict[str, Any], tensors: dict[str, Tensor]) -> Tape:
    tensors |= {name: restore(tensors[name], dtype) for name, dtype in described["views"].items()}
    decoder, tape = Decoder(tensors), Tape()
    tape.given_away = tape.grad.given_away = None
    views: tuple[tuple[TapeView, str], ...] = ((tape, "values"), (tape.grad, "gradients"))
    log: list[tuple[Any, dict[int, Any], list[int] | None]] = []
    for view, key in views:
        for track in described[key]:
            if not isinstance(track["address"], str):
                raise TypeError(f"{track['address']!r:.40} is not an address")
            entries = _entries(track, decoder)
            held = LogEntries(tape.log) if view is tape else entries
            made = view._tracks[track["address"]] = Track(held, kind=str(track["kind"]))
            if view is tape:
                log.append((held, entries, _order_of(track, len(entries))))
            made.site, made.where = str(track.get("site", "")), str(track.get("where", ""))
            made.lines = tuple(map(int, track.get("lines", ())))
            made.source = tuple(map(str, track.get("source", ())))
            if "numbers" in track:
                made.places = int(track["places"])
                made.numbers = {int(index): int(number) for index, number in track["numbers"]}
    _fill(tape, log)
    # tape.grad shares this dict.
    for name, address in described["aliases"].items():
        tape._aliases[str(parse(name))] = str(parse(address))
    return tape


def _order_of(track: dict[str, Any], count: int) -> list[int] | None:
    places = track.get("order")
    if places is None:  # The file is older than this field.
        return None
    if len(places) != count or not all(type(place) is int for place in places):
        raise ValueError("its order is not a list of positions")
    return list(places)


def _fill(tape: Tape, tracks: list[tuple[Any, dict[int, Any], list[int] | None]]) -> None:
    """Store the entries from a file on the tape, in the order in which they were produced."""
    tape.log.ordered = all(places is not None for _, _, places in tracks)
    found = []
    for held, entries, places in tracks:
        numbered = places if tape.log.ordered and places is not None else [0] * len(entries)
        found += [(place, held, call, entry) for place, (call, entry) in zip(numbered, entries.items(), strict=True)]
    for _, held, call, entry in sorted(found, key=lambda item: item[0]):
        held[call] = entry


def _notes(found: Any) -> dict[str, Any]:
    """Return the notes after a check of the fields that this library reads."""
    failed = found.get("failure")
    if failed is not None:
        texts = [failed[key] for key in ("address", "kind", "error", "message", "where")]
        texts += [text for key in ("inputs", "parameters") for pair in failed[key].items() for text in pair]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("its failure note is malformed")
        parse(failed["address"])
    lists = [found.get(key, []) for key in ("order", "tokens", "edits")]
    if not all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in lists):
        raise ValueError("its notes are not lists of texts")
    inputs = found.get("inputs", {})
    if not isinstance(inputs, dict) or not all(isinstance(text, str) for pair in inputs.items() for text in pair):
        raise ValueError("its note of the inputs is malformed")
    model = found.get("model", {})
    known = isinstance(model, dict) and all(isinstance(model[key], kind) for key, kind in MODEL_NOTE.items() if model)
    if not known:
        raise ValueError("its note of the model is malformed")
    return dict(found)


def _entries(track: dict[str, Any], decoder: Decoder) -> dict[int, Any]:
    entries: dict[int, Any] = {_call(index): _kept(decoder.decode(value)) for index, value in track["calls"]}
    for index, why in track["missing"]:
        slot = entries[_call(index)] = GradientSlot(None)
        slot.why = why if why in WHY else ""
    if len(entries) != len(track["calls"]) + len(track["missing"]):
        raise ValueError(f"{track['address']!r:.80} has the same call twice")
    return entries


def _call(index: Any) -> int:
    if type(index) is not int or not 0 <= index < MOST_CALLS:
        raise ValueError(f"{index!r:.40} is not a call number")
    return index


def _kept(value: Any) -> KeptValue:
    """Return an entry for a loaded value.

    Several addresses may share a tensor, so changes in place must be detected.
    """
    return KeptValue(value, [(tensor, tensor._version) for _, tensor in tensors_in(value)])
