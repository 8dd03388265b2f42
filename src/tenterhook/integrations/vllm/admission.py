"""The mark that a request gets when an engine admits it: its edits, its recordings, and a name for its cached prefix.

vLLM calls ``assign_request_id`` of its input processor once for each request, in the caller's process. There each
request gets what was open at that moment. So it is edited from its first token to its last, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenterhook.errors import EditError, NeverReached, SessionError
from tenterhook.integrations.vllm.row_edits import EditData
from tenterhook.integrations.vllm.worker_state import KEY

__all__ = ["NAMED", "Admission", "BlockEdits", "OwnEdits"]

NAMED = "tenterhook_edits"
"""the entry of a request's extra_args by which a client names saved edits"""
OFF = f"{NAMED}: edits by name are off. The server's middleware tenterhook.integrations.vllm.SavedEdits turns them on."

FOREIGN = (
    f"the entry {KEY!r} of a request's extra_args is made by engine.params(...) of this engine; got {{given!r:.80}}. "
    "Clients of a server name a saved edit instead."
)
OTHER = (
    "these sampling parameters have edits of another engine, or of one that was closed or restarted. Use "
    "engine.params(...) again."
)
NO_REQUEST = "no request was added in its block"
POOLING = "this request generates no tokens. Only requests that generate can be recorded and edited."
ATTACHED = "this engine is attached already. Use the object that the first attach() returned, or close it."


class BlockEdits:
    """The edits of all requests of a block, and which of them had an effect on none of its requests."""

    def __init__(self, data: EditData) -> None:
        self.data = data
        self._idle = [(address, rows, NO_REQUEST) for address, rows in data.rows]

    def admit(self, prompt: int, generated: int | None) -> None:
        """Note that a request with these edits was admitted."""
        found = [(address, rows, rows.out_of_reach(prompt, generated)) for address, rows, _ in self._idle]
        self._idle = [each for each in found if each[2]]

    def accept_no_request(self) -> None:
        """Do not insist on a request: a harvest has these edits, and may be complete."""
        self._idle = [each for each in self._idle if each[2] != NO_REQUEST]

    def check_reached(self) -> None:
        """Raise NeverReached if an edit had no effect on any request of the block."""
        for address, _, why in self._idle:
            raise NeverReached(f"{address!r}: this edit had no effect: {why}")


class Admission:
    """The requests that an engine admits, while it is attached."""

    def __init__(self, processor: Any) -> None:
        if "assign_request_id" in vars(processor):
            raise SessionError(ATTACHED)
        self._processor, self._assign = processor, processor.assign_request_id
        self.recordings: dict[str, bool] = {}
        """the open recordings, and whether their requests bypass the prefix cache"""
        self.edits: list[BlockEdits] = []
        self.named: Callable[[Any], list[EditData]] | None = None
        """a function that returns the edits of a name, if clients may name them"""
        self.is_open = True
        processor.assign_request_id = self._admit

    def close(self) -> None:
        """Stop marking requests."""
        if self.is_open:
            self.is_open = False
            del self._processor.assign_request_id

    def _admit(self, request: Any) -> None:
        try:
            self._mark(request)
        except EditError as error:
            raise _refusal(error) from None
        self._assign(request)

    def _mark(self, request: Any) -> None:
        params = request.sampling_params
        if params is None:
            if self.edits or self.recordings:
                raise EditError(POOLING)
            return
        extra = dict(params.extra_args or {})
        own = self._own_edits(extra)
        if not own and not self.edits and not self.recordings:
            if extra != (params.extra_args or {}):
                params.extra_args = extra
            return
        prompt = _length(request)
        edits = [*(each.data for each in self.edits), *own]
        _check(edits, own, prompt, params.max_tokens)
        for each in self.edits:
            each.admit(prompt, params.max_tokens)
        if any(self.recordings.values()):
            params.skip_reading_prefix_cache = True
        if salt := _salt(edits, prompt):
            request.cache_salt = f"{request.cache_salt or ''}{salt}"
        mark = {"request": request.request_id, "recordings": list(self.recordings), "edits": [dict(e) for e in edits]}
        params.extra_args = {**extra, KEY: mark}

    def _own_edits(self, extra: dict[str, Any]) -> list[EditData]:
        """Return the edits that came with the request."""
        given = extra.pop(KEY, None)
        found = [] if given is None else [given]
        if given is not None and not isinstance(given, OwnEdits):
            raise EditError(FOREIGN.format(given=given))
        if given is not None and given.admission is not self:
            raise EditError(OTHER)
        name = extra.pop(NAMED, None)
        if name is not None and self.named is None:
            raise EditError(OFF)
        return found if name is None or self.named is None else [*found, *self.named(name)]


def _refusal(error: EditError) -> Exception:
    """Return the same error as one that vLLM's asynchronous engine and server pass on to the client."""
    from vllm.exceptions import VLLMClientError

    made: Exception = type(type(error).__name__, (type(error), VLLMClientError), {})(str(error))
    return made


class OwnEdits(EditData):
    """The edits of one request, made by ``engine.params``."""

    admission: Admission | None = None
    """what admits the requests of the engine that made it"""

    def __deepcopy__(self, _memo: object) -> OwnEdits:
        """Refuse to be copied into a request of an engine that would ignore it."""
        if self.admission is not None and not self.admission.is_open:
            raise _refusal(EditError(OTHER))
        return self


def _length(request: Any) -> int:
    tokens = request.prompt_token_ids
    return len(tokens) if tokens is not None else len(request.prompt_embeds)


def _check(edits: list[EditData], own: list[EditData], prompt: int, generated: int | None) -> None:
    """Raise EditError if a request lacks tokens that it should have, or never reads what its own edits change."""
    for data in edits:
        for _, rows in data.rows:
            rows.check(prompt)
    for data in own:
        for address, rows in data.rows:
            if why := rows.out_of_reach(prompt, generated):
                raise EditError(f"{address!r}: this edit would have no effect: {why}")


def _salt(edits: list[EditData], prompt: int) -> str:
    """Return a name for the edits. Prefixes are shared among requests with the same name only.

    An edit that counts from the end of the prompt changes other tokens of a longer prompt with the same beginning.
    """
    rows = [each for data in edits for _, each in data.rows]
    length = f":{prompt}" if any(each.depends_on_prompt for each in rows) else ""
    return "".join(f"{KEY}:{data.digest}" for data in edits) + (length if edits else "")
