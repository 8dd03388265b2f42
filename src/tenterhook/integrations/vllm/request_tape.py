"""The values that an engine recorded, request by request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from tenterhook.address.suggest import listed, nearest
from tenterhook.errors import AmbiguousCall, NotRecorded, TapeError
from tenterhook.integrations.vllm.messages import unpack

__all__ = ["EngineTape", "RequestTape"]

CACHED = (
    "{address!r} of request {name!r}: the first {cached} tokens came from the prefix cache, so they were not computed. "
    'Read .part({address!r}) for the others, or record with prefix_cache="bypass".'
)
DRAFTS = (
    "this engine decodes speculatively, so the last rows may be of tokens that were rejected. Pass the output of the "
    "request instead of its id: tape.request(output)."
)
OPEN = "the recording of an asynchronous engine is read after its block: async with engine.record(...) as tape: ..."


@dataclass
class _Chunks:
    """The rows of one request at one address: pairs of the first token and a tensor, in the order of computation."""

    rows: list[tuple[int, Tensor]] = field(default_factory=list)

    @property
    def end(self) -> int:
        return max(first + len(tensor) for first, tensor in self.rows)


class RequestTape(Mapping[str, Tensor]):
    """The values of one request: ``[tokens, width]`` by address.

    The rows are those of the tokens that the model read, in order: the prompt, then the generated tokens except the
    last, which no step reads.
    """

    def __init__(self, facts: Mapping[str, Any], chunks: Mapping[str, _Chunks], tokens: int | None) -> None:
        self.id: str = facts["name"]
        self.sample: int = facts["sample"]
        """the number among the samples of one prompt (``n=`` of the sampling parameters)"""
        self.prompt_tokens: int = facts["prompt"]
        """the number of tokens of the prompt"""
        self.cached_tokens: int = facts["cached"]
        """the number of first tokens that came from the prefix cache; they have no values"""
        self._chunks, self._tokens = chunks, tokens

    def __getitem__(self, address: str) -> Tensor:
        first, rows = self._joined(address)
        if first:
            raise TapeError(CACHED.format(address=address, name=self.id, cached=first))
        return rows

    def part(self, address: str) -> tuple[int, Tensor]:
        """Return the number of the first token that was computed, and the rows from there on."""
        return self._joined(address)

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __repr__(self) -> str:
        return f"<request {self.id!r}: {len(self)} points, {self.prompt_tokens} prompt tokens>"

    def _joined(self, address: str) -> tuple[int, Tensor]:
        found = self._chunks.get(address)
        if found is None:
            near = nearest(address, self._chunks)
            hint = f"Did you mean {listed(near)}?" if near else f"It has {listed(list(self._chunks)) or 'no point'}."
            raise NotRecorded(f"{address!r} is not on the tape of request {self.id!r}.\n{hint}")
        end = found.end if self._tokens is None else min(self._tokens, found.end)
        start = min(first for first, _ in found.rows)
        _, example = found.rows[0]
        rows = example.new_empty((end, *example.shape[1:]))
        there = torch.zeros(end, dtype=torch.bool)
        for first, tensor in found.rows:  # A request that was preempted computes its rows again: the last ones count.
            count = min(len(tensor), max(end - first, 0))
            rows[first : first + count], there[first : first + count] = tensor[:count], True
        if not bool(there[start:].all()):
            missing = int(there[start:].logical_not().nonzero()[0]) + start
            raise TapeError(f"{address!r} of request {self.id!r} has no value for token {missing}: a step was not seen")
        return start, rows[start:]


class EngineTape:
    """The requests that ``engine.record`` has recorded."""

    def __init__(self, addresses: list[str], fetch: Callable[[], None] | None, *, speculative: bool) -> None:
        self.points = addresses
        """the addresses of the recorded points"""
        self._facts: dict[str, dict[str, Any]] = {}
        self._chunks: dict[str, dict[str, _Chunks]] = {}
        self._fetch, self._speculative = fetch, speculative
        self.is_open = True
        """True until the block of the recording ends"""

    @property
    def requests(self) -> list[str]:
        """The ids of the requests, in the order in which they were scheduled."""
        self._update()
        return list(dict.fromkeys(facts["name"] for facts in self._facts.values()))

    def request(self, request: Any, *, sample: int | None = None) -> RequestTape:
        """Return the tape of one request.

        Args:
            request: its id, or its ``RequestOutput``. If several requests had this id, the error names each of them.
            sample: which of its samples, for ``n=`` above 1.
        """
        self._update()
        if not isinstance(request, str) and not hasattr(request, "request_id"):
            raise TypeError(f"tape.request() takes the id of a request or its output; got a {type(request).__name__}")
        name = request if isinstance(request, str) else request.request_id
        found = [
            key
            for key, facts in self._facts.items()
            if name in (facts["name"], key) and (sample is None or facts["sample"] == sample)
        ]
        if not found:
            known = listed(list(dict.fromkeys(facts["name"] for facts in self._facts.values()))) or "none"
            raise NotRecorded(f"request {name!r} is not on this tape. It has these requests: {known}.")
        if len(found) > 1:
            raise AmbiguousCall(self._ambiguous(name, found))
        facts = self._facts[found[0]]
        return RequestTape(facts, self._chunks.get(found[0], {}), self._tokens(request, facts))

    def _ambiguous(self, name: str, found: list[str]) -> str:
        samples = {self._facts[key]["sample"]: key for key in found}
        if len(samples) < len(found):
            return f"{len(found)} requests had the id {name!r}; name one of them: {', '.join(map(repr, found))}"
        named = ", ".join(f"sample={sample}" for sample in sorted(samples))
        return f"request {name!r} was recorded {len(found)} times; say which: {named}"

    def __getitem__(self, address: str) -> NoReturn:
        raise TapeError(f"this tape has values of several requests: tape.request(output)[{address!r}]")

    def __repr__(self) -> str:
        return f"<EngineTape: {len(self.points)} points, {len(self._facts)} requests>"

    def _tokens(self, request: Any, facts: Mapping[str, Any]) -> int | None:
        """Return the number of tokens that the model read, if the output says so."""
        if not isinstance(request, str) and request.finished:
            generated = next(each for each in request.outputs if each.index == facts["sample"])
            return int(facts["prompt"]) + max(len(generated.token_ids) - 1, 0)
        if self._speculative:
            raise TapeError(DRAFTS)
        return None

    def _update(self) -> None:
        if self.is_open and self._fetch is None:
            raise NotRecorded(OPEN)
        if self._fetch is not None:
            self._fetch()

    # -- from the engine ----------------------------------------------------------------------------------------------

    def add(self, address: str, parts: list[dict[str, Any]]) -> bool:
        """Add the rows of a point that the workers sent, and return whether there are more.

        Values that are divided among the workers by heads are joined.
        """
        shares = [tensor for part in parts for tensor in unpack(part["tensors"]).values()]
        self._facts |= parts[0]["requests"]
        whole, place = torch.cat(shares, dim=-1) if shares else torch.empty(0), 0
        for key, count, first in parts[0]["rows"]:
            chunks = self._chunks.setdefault(key, {}).setdefault(address, _Chunks())
            chunks.rows.append((first, whole[place : place + count]))
            place += count
        return bool(parts[0]["more"])

    def end(self) -> None:
        """Fetch nothing more: the recording is over."""
        self.is_open, self._fetch = False, None
