"""Edits by name in the OpenAI-compatible server of vLLM.

The server loads the files of one folder when it starts. A client names one of them and sends no data of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tenterhook.edit.saved import load_edits
from tenterhook.errors import EditError, SessionError, TenterhookError
from tenterhook.integrations.vllm.admission import NAMED
from tenterhook.integrations.vllm.attach import AsyncEngine, attach
from tenterhook.integrations.vllm.row_edits import EditData, edit_data

__all__ = ["FOLDER", "SavedEdits"]

FOLDER = "TENTERHOOK_EDITS"
"""the environment variable with the folder of saved edits"""
NO_FOLDER = f"the server's middleware SavedEdits needs a folder of files of th.save_edits: set {FOLDER}=/path/of/folder"
NOT_NAMES = f"{NAMED} is the name of a saved edit, or a list of names; got {{given!r:.80}}"
UNKNOWN = "there is no saved edit {name!r:.80}. This server has: {known}."
logger = logging.getLogger("tenterhook")


class SavedEdits:
    """A middleware of the server: ``--middleware tenterhook.integrations.vllm.SavedEdits``.

    It attaches to the engine when the server starts. ``"vllm_xargs": {"tenterhook_edits": "calm"}`` in a request
    applies the edits of ``calm.edits`` to that request. A server whose engine has no extension does not start.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        folder = os.environ.get(FOLDER)
        if not folder or not Path(folder).is_dir():
            raise SessionError(NO_FOLDER)
        self._app, self._folder = app, Path(folder).resolve()
        self._edits: dict[str, EditData | TenterhookError] = {}
        self._engine: AsyncEngine | None = None
        self._attaching = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._engine is None:
            try:
                await self._attach(scope["app"].state.engine_client)
            except TenterhookError as error:
                if scope["type"] != "lifespan":
                    raise
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
        await self._app(scope, receive, send)

    async def _attach(self, client: Any) -> None:
        async with self._attaching:
            if self._engine is not None:
                return
            engine = attach(client)
            if not isinstance(engine, AsyncEngine):
                raise SessionError(NO_FOLDER)
            for file in sorted(self._folder.glob("*.edits")):
                if file.is_file() and file.resolve().parent == self._folder:
                    self._edits[file.stem] = await _loaded(engine, file)
            engine.admission.named = self.named
            self._engine = engine

    def named(self, given: Any) -> list[EditData]:
        """Return the edits that a request names, or raise EditError."""
        names = given if isinstance(given, list) else [given]
        if not all(isinstance(name, str) for name in names):
            raise EditError(NOT_NAMES.format(given=given))
        found = []
        for name in names:
            edits = self._edits.get(name)
            if edits is None:
                raise EditError(UNKNOWN.format(name=name, known=", ".join(self._edits) or "none"))
            if isinstance(edits, TenterhookError):
                raise EditError(f"the saved edit {name!r} does not fit this model: {edits}")
            found.append(edits)
        return found


async def _loaded(engine: AsyncEngine, file: Path) -> EditData | TenterhookError:
    """Return the edits of a file, or why they cannot be used. The server starts anyway."""
    try:
        data = edit_data(load_edits(file))
        await engine.call("check_edits", dict(data))
    except TenterhookError as error:
        logger.warning("%s cannot be used: %s", file, error)
        return error
    return data
