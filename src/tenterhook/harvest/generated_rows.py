"""Rows of generated text: one for each token that the model read, of the prompt and of what it generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tenterhook._tree import map_tensors
from tenterhook.errors import HarvestError
from tenterhook.harvest.batch_source import size_of
from tenterhook.harvest.rows import PickedRows
from tenterhook.pytorch.wrappers import unwrapped
from tenterhook.record.tape import Tape
from tenterhook.record.verb import record

if TYPE_CHECKING:
    from tenterhook.harvest.job import Job, Key

__all__ = ["check_generation", "generated_rows"]

NO_GENERATE = "generate= calls model.generate, and {kind} has no such method"
NOT_WITH = "generate= stores one row for each token that the model reads; remove {names}"
RIGHT = (
    "prompts are padded on the right. A decoder-only model continues after the last token, so "
    "that padding belongs on the left: tokenizer.padding_side = 'left'."
)
SEVERAL = (
    "generate= gave {found} sequences for {samples} samples. Leave out num_return_sequences, and repeat the prompts."
)


def check_generation(model: nn.Module, others: Mapping[str, Any]) -> None:
    """Raise if the model cannot generate, or if options were given that do not fit."""
    if not callable(getattr(model, "generate", None)):
        raise HarvestError(NO_GENERATE.format(kind=type(model).__name__))
    wrong = [f"{name}=" for name, value in others.items() if value is not None]
    if wrong:
        raise HarvestError(NOT_WITH.format(names=", ".join(wrong)))


def generated_rows(job: Job, batch: Any, first_sample: int) -> tuple[dict[Key, Tensor], int]:
    """Generate from the prompts of one batch. Return the rows of every column, and the number of samples."""
    samples = size_of(batch)
    _refuse_right_padding(job.model, batch)
    inputs = map_tensors(lambda tensor: tensor.to(job.device, non_blocking=True), batch)
    chosen = job.found if job.found is not None else job.selectors
    with torch.no_grad(), _own_seed(first_sample, job.device), record(job.model, *chosen, copy=job.copy) as tape:
        _generate(job.model, inputs, dict(job.generate or {}))
    picked = _picked(tape, samples, first_sample)
    bases = dict.fromkeys(address.partition("#")[0] for address in tape)
    found = job.found or tuple(address for address in job.addresses if address in bases)
    job.found = found
    rows: dict[Key, Tensor] = {}
    for address in found:
        rows[address, "value"] = job.taking.take(tape.sequence(address), picked, address)
    return rows | {(name, "row"): fact for name, fact in picked.facts.items()}, samples


def _generate(model: Any, inputs: Any, options: dict[str, Any]) -> None:
    if isinstance(inputs, Mapping):
        model.generate(**inputs, **options)
    elif isinstance(inputs, tuple | list):
        model.generate(*inputs, **options)
    else:
        model.generate(inputs, **options)


def _picked(tape: Tape, samples: int, first_sample: int) -> PickedRows:
    """Return which tokens have a row, and the facts of these rows."""
    tokens, mask = tape.tokens, tape.mask
    if len(tokens) != samples:
        raise HarvestError(SEVERAL.format(found=len(tokens), samples=samples))
    steps = torch.zeros(tokens.shape[1], dtype=torch.int32)
    # Without a key-value cache a later step reads a token again. Its step is the first one.
    for step, (start, length) in reversed(list(enumerate(tape.notes["runs"][-1]["steps"]))):
        steps[start : start + length] = step
    index = mask.flatten().nonzero().flatten()
    facts = {
        "sample": torch.arange(first_sample, first_sample + samples)[:, None].expand_as(tokens),
        "position": (mask.long().cumsum(1) - 1).to(torch.int32),
        "token": tokens.to(torch.int32),
        "step": steps.expand_as(tokens),
    }
    return PickedRows(samples, mask, index, {name: fact.flatten()[index] for name, fact in facts.items()})


def _refuse_right_padding(model: nn.Module, batch: Any) -> None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    config = getattr(unwrapped(model), "config", None)
    if isinstance(mask, Tensor) and not getattr(config, "is_encoder_decoder", False) and not mask[:, -1].all():
        raise HarvestError(RIGHT)


@contextmanager
def _own_seed(first_sample: int, device: torch.device) -> Iterator[None]:
    """Let sampling draw the same numbers for a batch, whichever process makes it and when."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(first_sample)
        yield
