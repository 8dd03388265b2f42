"""Which tokens a model read at each step of ``generate``, so that recorded steps can be joined to whole sequences."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook._text import counted
from tenterhook.errors import TapeError
from tenterhook.pytorch.wrappers import unwrapped
from tenterhook.record.tape_log import SPAN

if TYPE_CHECKING:
    from tenterhook.record.tape import Tape

__all__ = ["GenerationNotes", "end_tokens", "joined", "run_of"]

IDS = ("decoder_input_ids", "input_ids")
REORDERED = (
    "the tokens that the model read at step {step} are not those of the generated sequences at that position. Beam "
    "search changes the order of the rows, and assisted decoding reads tokens that it then rejects"
)
NO_TOKENS = "the model was called without input_ids"
NONE_RECORDED = (
    "this tape holds no generation. Open the session on the model whose generate() is called: with th.record(model, "
    "'h.3') as tape: model.generate(ids)"
)
NOT_HELD = "{address!r} has values for only {held} of {steps}. Record with keep='all', without a range of calls."
SEVERAL = "{address!r} was called {calls} times in {steps}; a sequence needs one call for each step."
SHAPE = (
    "{address!r} has no token dimension to join: at step {step} it is {shape}, and {batch} rows of {tokens} tokens "
    "were read. A sequence needs a tensor [batch, tokens, ...]."
)


class GenerationNotes:
    """Notes, on a tape, of each call of ``generate`` while the session is open."""

    def __init__(self, model: nn.Module, tape: Tape) -> None:
        self._model, self._tape = unwrapped(model), tape
        self._first = 0
        self._given: dict[str, Any] = {}
        self._read: list[Tensor | None] = []
        self._hook: Any = None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note where the run begins, and begin to note what the model reads."""
        inputs = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        self._given = {**kwargs, "input_ids": inputs}
        self._read, self._first = [], len(self._tape.log.entries)
        self._hook = self._model.register_forward_pre_hook(self._note_tokens, with_kwargs=True)

    def _note_tokens(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = next((kwargs[name] for name in IDS if isinstance(kwargs.get(name), Tensor)), None)
        if found is None and args and isinstance(args[0], Tensor):
            found = args[0]
        self._read.append(found.clone() if found is not None else None)

    def end(self, output: Any) -> None:
        """Note what was generated, and which tokens each step read."""
        self.close()
        tokens = getattr(output, "sequences", output)
        if not isinstance(tokens, Tensor):
            return
        run: dict[str, Any] = {"calls": _calls(self._tape, self._first)}
        steps = _steps(self._read, tokens)
        if isinstance(steps, str):
            run["refused"] = steps
        else:
            read = max((start + length for start, length in steps), default=0)
            run["steps"], run["tokens"] = steps, tokens[:, :read].tolist()
            run["mask"] = _mask(tokens[:, :read], self._given, self._model, steps[0][1] if steps else 0)
        self._tape.notes.setdefault("runs", []).append(run)
        self._given, self._read = {}, []

    def close(self) -> None:
        """Remove the hook that notes what the model reads; any number of times."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _calls(tape: Tape, first: int) -> dict[str, list[int]]:
    """Return, for each point that was recorded since an entry, its first call and the number of its calls.

    Positions in the log would not do: ``keep=`` drops entries before them, and so does ``tape.clear()``.
    """
    tracks: dict[str, Any] = tape._tracks
    names = {track.entries.base: address for address, track in tracks.items()}
    found: dict[str, list[int]] = {}
    for key in islice(tape.log.entries, first, None):
        call = key % SPAN
        found.setdefault(names[key - call], [call, 0])[1] += 1
    return found


def _steps(read: list[Tensor | None], tokens: Tensor) -> list[list[int]] | str:
    """Return the first position and the number of tokens of each step, or why they are unknown."""
    steps: list[list[int]] = []
    end = 0
    for step, ids in enumerate(read):
        if ids is None or ids.dim() != 2:  # noqa: PLR2004
            return NO_TOKENS
        length = ids.shape[1]
        # With a key-value cache a step reads new tokens only; without one it reads all of them again.
        start = next((at for at in (end, 0) if _equal(tokens[:, at : at + length], ids)), None)
        if start is None:
            return REORDERED.format(step=step)
        steps.append([start, length])
        end = max(end, start + length)
    return steps


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other.to(one.device))


def _mask(tokens: Tensor, given: Mapping[str, Any], model: nn.Module, prompt: int) -> list[list[int]]:
    """Return 1 for each token that is neither padding of a prompt nor comes after the end of a sequence."""
    mask = torch.ones(tokens.shape, dtype=torch.long, device=tokens.device)
    attention, ids = given.get("attention_mask"), given.get("input_ids")
    if isinstance(attention, Tensor) and isinstance(ids, Tensor) and attention.shape == ids.shape:
        times = tokens.shape[0] // max(attention.shape[0], 1)  # num_return_sequences repeats each prompt.
        width = min(prompt, attention.shape[1])
        if not _equal(tokens[:, : ids.shape[1]], ids.repeat_interleave(times, 0)):
            width = 0  # The mask is that of an encoder, and these are the tokens of its decoder.
        mask[:, :width] = attention[:, :width].repeat_interleave(times, 0).to(mask)
    ends = end_tokens(given, model)
    if ends:
        ended = torch.isin(tokens, torch.tensor(ends, device=tokens.device))
        ended[:, :prompt] = False
        mask[:, 1:] *= (ended.long().cumsum(1)[:, :-1] == 0).long()
    found: list[list[int]] = mask.tolist()
    return found


def end_tokens(given: Mapping[str, Any], model: nn.Module) -> list[int]:
    """Return the tokens that end a sequence, with these arguments of ``generate``."""
    config = given.get("generation_config") or getattr(model, "generation_config", None)
    found = given.get("eos_token_id", getattr(config, "eos_token_id", None))
    if isinstance(found, Tensor):
        found = found.tolist()
    if found is None:
        return []
    return [int(each) for each in found] if isinstance(found, (list, tuple)) else [int(found)]


# -- reading ----------------------------------------------------------------------------------------------------------


def run_of(tape: Tape, run: int) -> dict[str, Any]:
    """Return the notes of a call of ``generate``; raise if there is none, or if its tokens are unknown."""
    runs = tape.notes.get("runs") or []
    if not runs:
        raise TapeError(NONE_RECORDED)
    try:
        found: dict[str, Any] = runs[run]
    except IndexError:
        raise TapeError(f"run={run}: this tape holds {counted(len(runs), 'call')} of generate()") from None
    if "refused" in found:
        raise TapeError(f"the steps of this generation cannot be joined: {found['refused']}.")
    return found


def joined(address: str, calls: list[Any], run: Mapping[str, Any]) -> Tensor:
    """Join the values of the steps of one generation along the tokens."""
    steps, rows = run["steps"], len(run["tokens"])
    if len(calls) != len(steps):
        text = NOT_HELD if len(calls) < len(steps) else SEVERAL
        raise TapeError(
            text.format(address=address, held=len(calls), calls=len(calls), steps=counted(len(steps), "step"))
        )
    values = [_tensor(value) for value in calls]
    for step, (value, (_, length)) in enumerate(zip(values, steps, strict=True)):
        if value is None or value.dim() < 2 or value.shape[:2] != (rows, length):  # noqa: PLR2004
            shape = list(value.shape) if value is not None else "not one tensor"
            raise TapeError(SHAPE.format(address=address, step=step, shape=shape, batch=rows, tokens=length))
    if all(start == sum(length for _, length in steps[:step]) for step, (start, _) in enumerate(steps)):
        return torch.cat(values, 1)  # type: ignore[arg-type]
    whole: Any = values[0][:, :0]  # type: ignore[index]
    for value, (start, _) in zip(values, steps, strict=True):
        whole = torch.cat([whole[:, :start], value], 1)  # type: ignore[list-item]
    return whole  # type: ignore[no-any-return]


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, (tuple, list)):
        found = [part for part in value if isinstance(part, Tensor)]
        value = found[0] if found else None
    return value if isinstance(value, Tensor) else None
