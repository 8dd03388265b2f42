"""The end of each case's own generation, in a batch that generates until the last case has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenterhook._tree import describe
from tenterhook.batch.layout import CaseRows, WholeBatch
from tenterhook.errors import BatchError
from tenterhook.record.tape import Tape

__all__ = ["CaseGeneration", "cut_generation"]

NOT_TOKENS = (
    "th.batch(..., generate=...) returns one sequence of tokens for each row of a case. Leave out "
    "return_dict_in_generate and num_return_sequences; got {kind}"
)


@dataclass(frozen=True, slots=True)
class CaseGeneration:
    """The tokens of one case, and the number of its own steps out of all steps of the batch."""

    tokens: Tensor
    steps: int
    of: int
    notes: dict[str, Any] | None
    """which tokens each step read, for ``tape.sequence``"""

    def last_call(self, calls: int) -> int:
        """Return how many of a point's calls belong to this case."""
        return calls // self.of * self.steps if self.of and calls % self.of == 0 else calls


def cut_generation(  # all of it is needed, and it is called in one place
    output: Any, rows: CaseRows, whole: WholeBatch, prompt: int, ends: list[int], tape: Tape | None
) -> CaseGeneration:
    """Return the part of a case in the tokens that ``generate`` returned for its batch.

    ``prompt`` is the number of tokens that each row has before the first generated one.
    """
    if not isinstance(output, Tensor) or output.shape[0] != whole.rows:
        raise BatchError(NOT_TOKENS.format(kind=describe(output)))
    mine = output[rows.first : rows.first + rows.count]
    new = mine[:, prompt:]
    steps = int(_lengths(new, ends).max()) if new.numel() else 0
    padding = next(iter(whole.padding(rows).values()), 0) if whole.pads_left else 0
    tokens = mine[:, padding : prompt + steps]
    run = (tape.notes.get("runs") or [None])[-1] if tape is not None else None
    notes = _notes(run, rows, padding, steps) if run is not None else None
    return CaseGeneration(tokens.clone(), steps, new.shape[1], notes)


def _lengths(new: Tensor, ends: list[int]) -> Tensor:
    """Return how many tokens each row has up to and with its first end token."""
    if not ends:
        return torch.full((new.shape[0],), new.shape[1], device=new.device)
    ended = torch.isin(new, torch.tensor(ends, device=new.device)).long()
    before = ended.cumsum(1) - ended  # The number of end tokens before each token.
    return (before == 0).long().sum(1)


def _notes(run: Mapping[str, Any], rows: CaseRows, padding: int, steps: int) -> dict[str, Any]:
    """Return the notes of a case's own generation, from those of the batch."""
    if "refused" in run:
        return dict(run)
    own = [[max(0, start - padding), start + length - max(padding, start)] for start, length in run["steps"][:steps]]
    read = max((start + length for start, length in own), default=0)
    mine = slice(rows.first, rows.first + rows.count)
    return {
        "calls": dict(run["calls"]),
        "steps": own,
        "tokens": [row[padding : padding + read] for row in run["tokens"][mine]],
        "mask": [row[padding : padding + read] for row in run["mask"][mine]],
    }
