"""The mark that a request gets when an engine admits it: its edits, its recordings, and a name for its cached prefix.

vLLM calls ``assign_request_id`` of its input processor once for each request, in the caller's process. There each
request gets what was open at that moment. So it is edited from its first token to its last, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenterhook.errors import EditError, SessionError
from tenterhook.integrations.vllm.row_edits import EditData
from tenterhook.integrations.vllm.worker_state import KEY

__all__ = ["NAMED", "Admission", "OwnEdits"]

NAMED = "tenterhook_edits"
"""the entry of a request's extra_args by which a client names saved edits"""
OFF = f"{NAMED}: edits by name are off. The server's middleware tenterhook.integrations.vllm.SavedEdits turns them on."

FOREIGN = (
    f"the entry {KEY!r} of a request's extra_args is made by engine.params(...) of this engine; got {{given!r:.80}}. "
    "Clients of a server name a saved edit instead."
)
OTHER = "these sampling parameters belong to another engine, or to one before a restart. Use engine.params(...) again."
ATTACHED = "this engine is attached already. Use the object that the first attach() returned, or close it."


class Admission:
    """The requests that an engine admits, while it is attached."""

    def __init__(self, processor: Any) -> None:
        if "assign_request_id" in vars(processor):
            raise SessionError(ATTACHED)
        self._processor, self._assign = processor, processor.assign_request_id
        self.recordings: dict[str, bool] = {}
        """the open recordings, and whether their requests bypass the prefix cache"""
        self.edits: list[EditData] = []
        self.named: Callable[[Any], list[EditData]] | None = None
        """a function that returns the edits of a name, if clients may name them"""
        processor.assign_request_id = self._admit

    def close(self) -> None:
        """Stop marking requests."""
        if "assign_request_id" in vars(self._processor):
            del self._processor.assign_request_id

    def _admit(self, request: Any) -> None:
        if request.sampling_params is not None:
            try:
                self._mark(request)
            except EditError as error:
                raise _refusal(error) from None
        self._assign(request)

    def _mark(self, request: Any) -> None:
        params = request.sampling_params
        extra = dict(params.extra_args or {})
        edits = [*self.edits, *self._own_edits(extra)]
        if not edits and not self.recordings:
            if extra != (params.extra_args or {}):
                params.extra_args = extra
            return
        if any(self.recordings.values()):
            params.skip_reading_prefix_cache = True
        salt = _salt(edits, _length(request))
        if salt:
            request.cache_salt = f"{request.cache_salt or ''}{salt}"
        mark = {"request": request.request_id, "recordings": list(self.recordings), "edits": [dict(e) for e in edits]}
        params.extra_args = {**extra, KEY: mark}

    def _own_edits(self, extra: dict[str, Any]) -> list[EditData]:
        """Return the edits that came with the request."""
        given = extra.pop(KEY, None)
        found = [] if given is None else [given]
        if given is not None and not isinstance(given, OwnEdits):
            raise EditError(FOREIGN.format(given=given))
        if given is not None and given.admission != id(self):
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

    admission = 0


def _length(request: Any) -> int:
    tokens = request.prompt_token_ids
    return len(tokens) if tokens is not None else len(request.prompt_embeds)


def _salt(edits: list[EditData], prompt: int) -> str:
    """Return a name for the edits. Prefixes are shared among requests with the same name only.

    An edit that counts from the end of the prompt changes other tokens of a longer prompt with the same beginning.
    """
    rows = [each for data in edits for each in data.rows]
    for each in rows:
        each.check(prompt)
    length = f":{prompt}" if any(each.depends_on_prompt for each in rows) else ""
    return "".join(f"{KEY}:{data.digest}" for data in edits) + (length if edits else "")
