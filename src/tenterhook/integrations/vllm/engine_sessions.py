"""The blocks of an engine: a recording of requests, and edits of all requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Self

from tenterhook.errors import SessionError
from tenterhook.integrations.vllm.admission import BlockEdits
from tenterhook.integrations.vllm.request_tape import EngineTape
from tenterhook.integrations.vllm.row_edits import EditData

__all__ = ["EngineEditing", "EngineRecording"]


class _EngineSession:
    """A block of an engine. Both kinds of engine open and close it with the same questions to the workers."""

    engine: Any

    is_open = False

    def _refuse(self, how: str, *, is_async: bool) -> None:
        if self.engine.is_async != is_async:
            raise SessionError(f"this is an {type(self.engine).__name__}: open its sessions with '{how}'")
        if self.is_open:
            raise SessionError("this session is open already. For a second one, call the verb of the engine again")

    def start(self) -> Any:
        """Begin the block."""
        raise NotImplementedError

    def close(self) -> None:
        """End the block; any number of times."""
        raise NotImplementedError


class EngineRecording(_EngineSession):
    """A recording of requests. ``engine.record`` creates it."""

    def __init__(self, engine: Any, selectors: list[str], *, bypass: bool) -> None:
        self.engine, self._selectors, self._bypass = engine, selectors, bypass
        self.name = ""
        self.tape: EngineTape | None = None

    def start(self) -> EngineTape:
        """Begin to record."""
        self._refuse("async with", is_async=False)
        self.name = secrets.token_hex(8)
        return self._begin(self.engine.call("record", self.name, self._selectors), self._fetch)

    def close(self) -> None:
        """Fetch the remaining rows, and end; any number of times."""
        if self._ends() and self.tape is not None:
            self._fetch()
            self.engine.call("end", self.name)
            self.tape.end()

    async def close_async(self) -> None:
        """Do what ``close`` does, for an asynchronous engine."""
        if self._ends() and self.tape is not None:
            for address in self.tape.points:
                while self.tape.add(address, await self.engine.call("take", self.name, address)):
                    pass
            await self.engine.call("end", self.name)
            self.tape.end()

    def _begin(self, answers: list[Any], fetch: Callable[[], None] | None) -> EngineTape:
        self.tape = EngineTape(answers[0], fetch, speculative=self.engine.speculative)
        self.engine.admission.recordings[self.name] = self._bypass
        self.engine.open_recordings.append(self)
        self.is_open = True
        return self.tape

    def _ends(self) -> bool:
        """Mark no more requests, and return whether this was still open."""
        self.is_open = False
        self.engine.open_recordings[:] = [each for each in self.engine.open_recordings if each is not self]
        return self.engine.admission.recordings.pop(self.name, None) is not None

    def _fetch(self) -> None:
        if self.tape is not None:
            for address in self.tape.points:
                while self.tape.add(address, self.engine.call("take", self.name, address)):
                    pass

    def __enter__(self) -> EngineTape:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> EngineTape:
        self._refuse("with", is_async=True)
        self.name = secrets.token_hex(8)
        return self._begin(await self.engine.call("record", self.name, self._selectors), None)

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()


class EngineEditing(_EngineSession):
    """Edits of all requests. ``engine.edit`` creates it."""

    def __init__(self, engine: Any, data: EditData) -> None:
        self.engine, self._data = engine, data
        self._edits: BlockEdits | None = None

    def start(self) -> Self:
        """Begin to edit."""
        self._refuse("async with", is_async=False)
        self.engine.call("check_edits", dict(self._data))
        return self._begin()

    def close(self) -> None:
        """End. Requests that were admitted before keep their edits.

        Raises:
            NeverReached: one of the edits had an effect on no request of the block.
        """
        edits = self._ends()
        if edits is not None:
            edits.check_reached()

    def _begin(self) -> Self:
        self._edits, self.is_open = BlockEdits(self._data), True
        self.engine.admission.edits.append(self._edits)
        return self

    def _ends(self) -> BlockEdits | None:
        """Edit no more requests, and return the edits if this was still open."""
        edits, self._edits, self.is_open = self._edits, None, False
        held = self.engine.admission.edits
        held[:] = [each for each in held if each is not edits]
        return edits

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._ends()

    async def __aenter__(self) -> Self:
        self._refuse("with", is_async=True)
        await self.engine.call("check_edits", dict(self._data))
        return self._begin()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.__exit__(kind)
