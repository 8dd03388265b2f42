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

__all__ = ["CaseGeneration", "cut_generation", "option_that_sees_padding"]

# Options that count the tokens of the whole sequence, or look at them, and the values that switch them off.
SEE_PADDING: dict[str, tuple[Any, ...]] = {
    "max_length": (None,), "min_length": (None, 0), "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0), "sequence_bias": (None,), "bad_words_ids": (None,), "stop_strings": (None,),
    "logits_processor": (None, []), "stopping_criteria": (None, []), "prefix_allowed_tokens_fn": (None,),
}  # fmt: skip
NOT_TOKENS = (
    "th.batch(..., generate=...) returns one sequence of tokens for each row of a case. Leave out "
    "return_dict_in_generate and num_return_sequences; got {kind}"
)


def option_that_sees_padding(options: Mapping[str, Any], model: Any, *, reads_cache: bool) -> str | None:
    """Return an option of ``generate`` for which a padded prompt is another prompt, or None.

    ``reads_cache``: whether values as long as the key-value cache are recorded or edited. A static cache stays from one
    call to the next, and its length is that of the longest call.
    """
    config = options.get("generation_config") or getattr(model, "generation_config", None)
    for name, off in (SEE_PADDING | ({"cache_implementation": (None, "dynamic")} if reads_cache else {})).items():
        if name == "max_length" and (name not in options or options.get("max_new_tokens") is not None):
            continue  # The default of a configuration counts new tokens only.
        if options.get(name, getattr(config, name, None)) not in off:
            return name
    return None


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
