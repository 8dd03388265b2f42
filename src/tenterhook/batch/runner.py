"""The runner of a batch: it groups the cases, runs each group, and compares some cases with single runs."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tenterhook._free_memory import free_memory
from tenterhook._text import counted
from tenterhook._tree import tensors
from tenterhook.address import Point
from tenterhook.address.walk import structure
from tenterhook.batch.case_tape import cut_value
from tenterhook.batch.generated import option_that_sees_padding
from tenterhook.batch.inputs import InputNames
from tenterhook.batch.known import EVERY, Known, known_model
from tenterhook.batch.layout import Layouts, WholeBatch
from tenterhook.batch.mixing import difference, mixes, size_of, values_differ
from tenterhook.batch.prepared import PreparedCase, prepare_cases, reads_cache
from tenterhook.batch.result import BatchResult, CaseRun
from tenterhook.batch.runs import RETURN, Model, rows_of, run_alone, run_together
from tenterhook.errors import BatchError, TenterhookError
from tenterhook.pytorch.wrappers import unwrapped
from tenterhook.record.kept_value import value
from tenterhook.record.tape import Tape
from tenterhook.record.verb import record

__all__ = ["BatchRunner"]

SHARE = 0.25  # Share of the free memory that a batch may use.
TEMPORARY = 4  # Temporary memory of a run, as a multiple of what it keeps.
FEW = 3  # Cases that are compared with single runs when a model is new.
FAILED = "the model failed with several cases at once: {error!r:.200}. Run them one at a time: th.batch(..., batch=1)."


class BatchRunner:
    """The state of a batch while it runs."""

    def __init__(
        self,
        model: nn.Module,
        cases: Sequence[Any],
        *,
        generate: Mapping[str, Any] | None,
        tokenizer: Any,
        most: int | None,
    ) -> None:
        names = InputNames(model)
        options = dict(generate) if generate is not None else None
        padding_token = _padding_token(model, tokenizer)
        if options is not None and getattr(getattr(model, "generation_config", None), "pad_token_id", None) is None:
            options.setdefault("pad_token_id", padding_token)
        self.model = Model(model, options, names, padding_token)
        self.cases = prepare_cases(model, cases, tokenizer, generates=options is not None)
        self.most = most
        self.unpadded = self._sees_padding()
        self.found: dict[int, CaseRun] = {}
        self.batches: list[int] = []
        self.compared = 0
        self.alone: list[int] = []

    def run(self) -> BatchResult:
        """Run all cases and return their results."""
        with _buffers_restored(self.model.module):
            for group in _groups(self.cases, pads=self.unpadded is None):
                self._run_group(group)
        return BatchResult([self.found[each.index] for each in self.cases], self._how())

    # -- groups -------------------------------------------------------------------------------------------------------

    def _run_group(self, group: list[PreparedCase]) -> None:
        """Run cases that fit together, the short ones first."""
        waiting = sorted(group, key=lambda each: (_shortest(each), each.inputs.tokens))
        if len(group) == 1 or self.most == 1:
            for each in waiting:
                self._run_single(each)
            return
        known = known_model(self.model.module, self._kind(group))
        checked = known.is_due(len(group), self._room(waiting, known), _shortest(waiting[0]))
        alone: CaseRun | None = None
        layouts, used = known.layouts, points_of(group)
        if layouts is None or checked:
            layouts = Layouts(steps=self.model.generate is not None)
            alone = self._first_alone(waiting, layouts, known)
        while waiting:
            now = waiting[: self._room(waiting, known)]
            if len(now) == 1:
                self._run_single(waiting.pop(0))
                continue
            # The batch with the case that ran alone shows where the rows of all values are, in later batches too.
            learns = alone is not None
            whole = whole_batch(now, self._pads_left, group=group if learns else ())
            layouts.place(rows_of(now)[0] if learns else None, whole)
            runs = self._run_batch(now, layouts, whole, used if learns else ())
            if runs is None:
                known.room = max(1, len(now) // 2)
                continue
            del waiting[: len(now)]
            self.found.update({each.index: run for each, run in zip(now, runs, strict=True)})
            self.batches.append(len(now))
            longest = max(whole.lengths.values(), default=0)
            if longest > known.longest and alone is None:  # Models treat more padding in another way, such as windows.
                alone = self._alone(now[0])[0]
            for case, single in self._to_compare(now, alone, known):
                self._compare(case, single, now, layouts, whole)
            known.ran(len(now), _shortest(now[0]), longest, compared=alone is not None)
            alone = None
        known.layouts = layouts

    def _kind(self, group: list[PreparedCase]) -> Any:
        """Return what decides how rows are found, and whether rows mix."""
        names = frozenset(map(str, points_of(group)))
        padded = frozenset(
            axis for axis in group[0].inputs.lengths if len({each.inputs.lengths[axis] for each in group}) > 1
        )
        options = repr(self.model.generate)
        return group[0].inputs.key, names, padded, options, repr(group[0].shared), group[0].case.grad is None

    def _sees_padding(self) -> str | None:
        """Return the option of ``generate`` for which a padded prompt gives another result, or None."""
        options, model = self.model.generate, self.model.module
        if options is None or not self._pads_left:
            return None
        return option_that_sees_padding(options, model, reads_cache=any(map(reads_cache, self.cases)))

    @property
    def _pads_left(self) -> bool:
        """True if tokens are padded on the left, so that all prompts end at the same position."""
        config = getattr(unwrapped(self.model.module), "config", None)
        return self.model.generate is not None and not getattr(config, "is_encoder_decoder", False)

    def _first_alone(self, group: list[PreparedCase], layouts: Layouts, known: Known) -> CaseRun:
        """Run the first case alone, and remember the shapes of all values that any case edits or records."""
        first = group[0]
        others = set(points_of(group)) - set(first.points)
        alone, whole = self._alone(first, others)
        layouts.add_alone(RETURN, 0, alone.output)
        size = sum(tensor.nbytes for _, tensor in tensors(alone.output))
        if whole is not None:
            size += whole.nbytes
            for address, track in whole._tracks.items():
                for call, entry in track.entries.items():
                    layouts.add_alone(address, call, value(entry))
        known.bytes_per_token = max(1, size // first.inputs.tokens)
        return alone

    def _room(self, waiting: list[PreparedCase], known: Known) -> int:
        """Return how many of the waiting cases run at once."""
        most = min(self.most or len(waiting), known.room)
        device = next((each.device for each in self.model.module.parameters()), torch.device("cpu"))
        tokens = free_memory(device) * SHARE / (TEMPORARY * known.bytes_per_token)
        count, rows = 0, 0
        for each in waiting[:most]:
            rows += each.inputs.rows
            if count > 1 and rows * each.inputs.tokens / each.inputs.rows > tokens:
                break
            count += 1
        return count

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _run_single(self, case: PreparedCase) -> None:
        self.found[case.index] = self._alone(case)[0]
        self.alone.append(case.index)

    def _alone(self, case: PreparedCase, others: Iterable[Point] = ()) -> tuple[CaseRun, Tape | None]:
        try:
            return run_alone(self.model, case, others)
        except Exception as error:
            error.add_note(f"in case {case.index} of the batch")
            raise

    def _run_batch(
        self, cases: list[PreparedCase], layouts: Layouts, whole: WholeBatch, others: Iterable[Point]
    ) -> list[CaseRun] | None:
        """Run some cases together, or return None if they do not fit in memory. ``others``: more points to look at."""
        try:
            return run_together(self.model, cases, layouts, whole, others)
        except torch.OutOfMemoryError:
            return None
        except BatchError:
            raise
        except Exception as error:
            for each in cases:
                self._alone(each)  # If a case fails by itself, its own error is the one to see.
            if isinstance(error, TenterhookError):
                raise  # It says what to do.
            raise BatchError(FAILED.format(error=error)) from error

    # -- checks -------------------------------------------------------------------------------------------------------

    def _to_compare(
        self, cases: list[PreparedCase], alone: CaseRun | None, known: Known
    ) -> Iterator[tuple[PreparedCase, CaseRun]]:
        """Yield cases to compare, with their results alone."""
        if alone is None:
            return
        yield cases[0], alone
        if known.checks or len(cases) <= FEW:
            return
        # A statistic over the batch, such as a maximum, changes the cases with small values most.
        small = min(cases[1:], key=lambda each: size_of(self.found[each.index].output))
        rest = [each for each in cases[1:] if each is not small]
        other = random.Random(len(cases)).choice(rest)  # noqa: S311  Not for security.
        for each in (small, other):
            yield each, self._alone(each)[0]

    def _compare(
        self, case: PreparedCase, alone: CaseRun, cases: list[PreparedCase], layouts: Layouts, whole: WholeBatch
    ) -> None:
        self.compared += 1
        hidden = case.inputs.hidden(self.model.names)
        found = difference(alone, self.found[case.index], hidden)
        if not found:
            return
        options = self.model.generate or {}
        first = None if options else self._first_difference(case, cases, layouts, whole)
        padded = any(whole.padding(rows)[axis] for rows in rows_of(cases) for axis in whole.lengths)
        samples = bool(options.get("do_sample"))
        facts = {"padded": padded, "samples": samples, "hides": hidden is not None}
        raise mixes(case.index, found, first, model=self.model.module, **facts)

    def _first_difference(
        self, case: PreparedCase, cases: list[PreparedCase], layouts: Layouts, whole: WholeBatch
    ) -> tuple[str, str] | None:
        """Return the first module whose output differs, and its class."""
        model, own = self.model, next(rows for each, rows in zip(cases, rows_of(cases), strict=True) if each is case)
        with record(model.module) as single:
            run_alone(model, case)
        with record(model.module) as batched:
            run_together(model, cases, layouts, whole)
        every = Layouts(steps=False)
        every.place(own, whole)
        for address in single.in_order():
            name, _, call = address.partition("#")
            with contextlib.suppress(TenterhookError):
                every.add_alone(name, int(call or 0), single[address])
                part = cut_value(every, own, whole)(name, int(call or 0), batched[address])
                if values_differ(single[address], part, case.inputs.hidden(model.names)):
                    return address, single._tracks[name].kind
        return None

    def _how(self) -> list[str]:
        lines = []
        if self.batches:
            sizes = ", ".join(map(str, self.batches))
            lines.append(
                f"{counted(sum(self.batches), 'case')} in {counted(len(self.batches), 'batch', 'batches')}: {sizes}"
            )
            if self.compared:
                lines.append(f"{counted(self.compared, 'case')} also ran alone and gave the same result")
            else:
                lines.append(f"no case ran alone: fewer than {EVERY} cases ran since the last comparison on this model")
        if self.alone:
            why = "batch=1" if self.most == 1 else "no other case has inputs of the same kind"
            lines.append(f"{counted(len(self.alone), 'case')} alone: {why}")
        if self.unpadded is not None and self.most != 1:
            lines.append(f"only prompts of one length ran together: {self.unpadded}= sees padding")
        return lines


def _groups(cases: list[PreparedCase], *, pads: bool) -> list[list[PreparedCase]]:
    groups: list[list[PreparedCase]] = []
    for each in cases:
        group = next((group for group in groups if group[0].fits(each, pads=pads)), None)
        if group is None:
            groups.append([each])
        else:
            group.append(each)
    return groups


def _shortest(case: PreparedCase) -> int:
    return min(case.inputs.lengths.values(), default=0)


def points_of(group: Iterable[PreparedCase]) -> list[Point]:
    """Return the points that cases record or edit, many of which are the same objects."""
    recorded = {id(each.points): each.points for each in group}
    points = {id(point): point for points in recorded.values() for point in points}
    points |= {id(point): point for each in group for point, _ in each.edits}
    return list(points.values())


def whole_batch(cases: list[PreparedCase], pads_left: bool, *, group: Sequence[PreparedCase]) -> WholeBatch:  # noqa: FBT001
    """Return the size of a batch.

    With a ``group`` of cases that run in this batch and in later ones, the padding of the first case tells the axes and
    the rows apart.
    """
    lengths: dict[str, int] = {}
    rows = sum(each.inputs.rows for each in cases)
    used = {rows - cases[0].inputs.rows}
    for axis, mine in cases[0].inputs.lengths.items():
        longest = max(each.inputs.lengths[axis] for each in cases)
        if any(each.inputs.lengths[axis] != mine for each in group):
            while longest == mine or longest - mine in used:
                longest += 1
            used.add(longest - mine)
        lengths[axis] = longest
    return WholeBatch(rows, lengths, pads_left)


def _padding_token(model: nn.Module, tokenizer: Any) -> int:
    """Return the token that pads: the model's own, or that of the tokenizer, or the end of a text, or 0.

    A token that the model has no embedding for is not used: a configuration may name one.
    """
    inner: Any = unwrapped(model)
    embedding = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    tokens = getattr(embedding, "num_embeddings", sys.maxsize)
    for holder in (getattr(inner, "config", None), tokenizer):
        for name in ("pad_token_id", "eos_token_id"):
            found = getattr(holder, name, None)
            if isinstance(found, int) and 0 <= found < tokens:
                return found
    return 0


@contextlib.contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    """In training mode, restore the buffers that runs change: a refused batch, or a comparison, leaves no trace."""
    if not any(module.training for module in structure(model)[2] if module is not None):
        yield
        return
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before and not torch.equal(buffer, before[name]):
                    buffer.copy_(before[name])
