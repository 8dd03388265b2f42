"""The requests of a worker that are recorded or edited, and their rows that were recorded and not fetched yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tenterhook.integrations.vllm.messages import pack
from tenterhook.integrations.vllm.row_edits import RowEdit
from tenterhook.integrations.vllm.runner_rows import RequestRows

__all__ = ["RecordedRows", "Request"]

MESSAGE_BYTES = 256 << 20
"""bytes of recorded rows in one answer; the format of vLLM's messages ends at 4 GiB"""
DEVICE_BYTES = 256 << 20
"""recorded bytes that stay on an accelerator before they are moved to host memory"""


@dataclass(slots=True)
class Request:
    """A request that is recorded or edited."""

    name: str
    """the id that the user knows"""
    sample: int
    """its number among the ``n`` samples of one prompt"""
    prompt: int
    """the number of tokens of its prompt"""
    cached: int
    """the number of its first tokens that came from the prefix cache, and were not computed"""
    recordings: list[str]
    edits: list[dict[str, list[RowEdit]]]

    def edits_at(self, address: str) -> list[RowEdit]:
        """Return its edits at a point, in order."""
        return [edit for each in self.edits for edit in each.get(address, ())]


@dataclass
class RecordedRows:
    """The rows that a session has recorded and that were not fetched yet."""

    points: list[str]
    chunks: dict[str, list[tuple[Tensor, list[RequestRows]]]] = field(default_factory=dict)
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    on_device: int = 0

    def add(self, address: str, taken: Tensor, rows: list[RequestRows]) -> None:
        """Keep the rows of a step."""
        self.chunks.setdefault(address, []).append((taken, rows))
        if taken.device.type != "cpu":
            self.on_device += taken.nbytes
            if self.on_device > DEVICE_BYTES:
                self._to_host()

    def _to_host(self) -> None:
        for held in self.chunks.values():
            held[:] = [(tensor.cpu(), rows) for tensor, rows in held]
        self.on_device = 0

    def take(self, address: str) -> dict[str, Any]:
        """Return rows of one point as plain data, up to a size that fits a message, and forget them."""
        held = self.chunks.get(address, [])
        taken: list[tuple[Tensor, list[RequestRows]]] = []
        size = 0
        while held and size < MESSAGE_BYTES:
            tensor, rows = held.pop(0)
            taken.append((tensor.cpu(), rows))
            size += tensor.nbytes
        joined = {address: torch.cat([tensor for tensor, _ in taken])} if taken else {}
        listed_rows = [[each.request, each.stop - each.start, each.position] for _, some in taken for each in some]
        return {"tensors": pack(joined), "rows": listed_rows, "more": bool(held), "requests": self.requests}
