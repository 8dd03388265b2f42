"""Harvesting from an engine that serves a model: it takes prompts, and returns the values of each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenterhook.errors import HarvestError
from tenterhook.harvest.batch_source import Cut, digest
from tenterhook.harvest.early_rows import Begin
from tenterhook.harvest.identity import Identity
from tenterhook.harvest.job import Batch, Job, Key
from tenterhook.harvest.rows import RowRule

__all__ = ["EngineJob", "HarvestEngine", "ServedRequest", "prompts_of"]

PROMPTS = 256
PROMPT_LIST = (
    "an engine harvests prompts: a list of texts, or of lists of token ids; got {kind}. The engine batches them, "
    "without padding."
)
FOR_MODELS = (
    "{names} of th.harvest: for models in this process, not for an engine. An engine takes prompts, rows=, reduce=, "
    "project=, dtype=, generate=, batch_size=, shard_rows=, shard_bytes=, memory=, progress= and wait=."
)
LENGTHS = (
    'requests have different numbers of tokens, so their rows differ in shape. Use rows="token" for a row of each '
    'token, or reduce="last", "mean" or "max" for a row of each request.'
)
REDUCED = {
    "last": lambda rows: rows[-1],
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
}


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """The tokens and values of one prompt."""

    tokens: list[int]
    """the tokens that the model read: those of the prompt, then the generated ones but the last"""
    prompt: int
    """how many of them are of the prompt"""
    values: dict[str, Tensor]
    """for each point a row for each token"""


class HarvestEngine(ABC):
    """An engine that serves a model. ``th.harvest`` takes it in place of a model."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return what the values depend on, besides the prompts, as plain JSON with an entry ``weights``."""

    @abstractmethod
    def resolved(self, selectors: Sequence[Any]) -> list[str]:
        """Return the addresses of the points that selectors match, or raise AddressError."""

    @abstractmethod
    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise HarvestError if requests cannot have these options of generation."""

    @abstractmethod
    def serve(self, prompts: Sequence[Any], points: Sequence[str], options: Mapping[str, Any]) -> list[ServedRequest]:
        """Run prompts with these options of generation, and return the values in the order of the prompts.

        Without options, only the prompts run.
        """


class EngineJob(Job):
    """The rows of one engine at some points."""

    def __init__(
        self, engine: HarvestEngine, selectors: Sequence[Any], taking: RowRule, *, generate: Mapping[str, Any] | None
    ) -> None:
        if not selectors:
            raise HarvestError(
                'name the points to harvest: th.harvest(engine, prompts, "model.layers.6@resid", to="acts")'
            )
        if taking.by == "sample" and taking.reduce is None:
            raise HarvestError(LENGTHS)
        self.engine, self.taking, self.generate = engine, taking, generate
        engine.check_options(generate or {})
        self.addresses = tuple(engine.resolved(selectors))
        self.found: tuple[str, ...] | None = None
        self.device = torch.device("cpu")
        self._tried: tuple[str, Batch] | None = None

    def identify(self, cutting: dict[str, Any], *, weights: bool = True) -> Identity:  # noqa: ARG002
        reduce = self.taking.reduce
        if callable(reduce):
            raise HarvestError("reduce= of an engine's harvest is 'last', 'mean' or 'max'")
        tree = {"model": self.engine.described(), "points": list(self.addresses), **self.taking.described()}
        return Identity(tree | {"reduce": reduce, "generate": dict(self.generate or {})}, {})

    def begins(self, begin: Begin) -> Begin | None:  # noqa: ARG002  # rows come from another process
        return None

    def run(self, batch: Any, first_sample: int, begin: Begin | None = None) -> Batch:  # noqa: ARG002
        """Serve a batch of prompts, and return the rows."""
        served = self.engine.serve(batch, self.addresses, self.generate or {})
        self.found = self.addresses
        rows: dict[Key, Tensor] = {
            (address, "value"): torch.cat([self._rows(each.values[address]) for each in served])
            for address in self.addresses
        }
        facts = self._facts(served, first_sample)
        return Batch(rows | {(name, "row"): fact for name, fact in facts.items()}, len(batch))

    def _rows(self, value: Tensor) -> Tensor:
        reduce = self.taking.reduce
        if isinstance(reduce, str):
            value = REDUCED[reduce](value)[None]
        if self.taking.project is not None:
            value = value @ self.taking.project.to(value.dtype)
        return value if self.taking.dtype is None else value.to(self.taking.dtype)

    def _facts(self, served: list[ServedRequest], first: int) -> dict[str, Tensor]:
        if self.taking.by == "sample":
            return {"sample": torch.arange(first, first + len(served))}
        counts = torch.tensor([len(each.tokens) for each in served])
        position = torch.cat([torch.arange(len(each.tokens), dtype=torch.int32) for each in served])
        prompt = torch.tensor([each.prompt for each in served]).repeat_interleave(counts)
        return {
            "sample": torch.arange(first, first + len(served)).repeat_interleave(counts),
            "position": position,
            "token": torch.tensor([token for each in served for token in each.tokens], dtype=torch.int32),
            "step": (position - prompt + 1).clamp(min=0).to(torch.int32),
        }


def prompts_of(prompts: Any, size: int | None) -> Cut:
    """Return the source of a list of prompts. The engine gets ``size`` of them at a time."""
    is_list = isinstance(prompts, list | tuple)
    if not is_list or not prompts or not isinstance(prompts[0], str | list | tuple):
        kind = f"a {type(prompts).__name__}"
        if is_list:
            kind = f"{kind} of {type(prompts[0]).__name__}" if prompts else "nothing"
        raise HarvestError(PROMPT_LIST.format(kind=kind))
    return Cut(len(prompts), size or PROMPTS, lambda start, stop: list(prompts[start:stop]), lambda: digest(*prompts))


def refuse_options(given: dict[str, Any]) -> None:
    """Raise HarvestError for options that only make sense for a model in this process."""
    names = [f"{name}=" for name, value in given.items() if value]
    if names:
        raise HarvestError(FOR_MODELS.format(names=", ".join(names)))
