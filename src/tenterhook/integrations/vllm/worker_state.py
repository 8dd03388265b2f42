"""The state of one worker: the requests that it serves for us, its points, edits and recordings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tenterhook.address import Point
from tenterhook.address.suggest import listed
from tenterhook.errors import AddressError, SessionError
from tenterhook.harvest.weights_digest import weights_of
from tenterhook.integrations.vllm.messages import pack
from tenterhook.integrations.vllm.point_actions import PointActions
from tenterhook.integrations.vllm.row_edits import RowEdit, row_edits, try_edit
from tenterhook.integrations.vllm.runner_rows import RequestRows, rows_of
from tenterhook.integrations.vllm.served_points import (
    BY_HEADS,
    TOKENS,
    ValueLayout,
    layout_of,
    learn_meanings,
    refuse_divided,
    served_points,
)

__all__ = ["KEY", "Request", "WorkerState"]

KEY = "tenterhook"
"""the entry of ours in the ``extra_args`` of a request's sampling parameters"""
COMPILED = (
    "{address!r}: this engine runs compiled code, in which points cannot be added after it started. {there} Start it "
    "with LLM(model, **declare({address!r})), or with enforce_eager=True for all points."
)
EDIT_SETS = 256
"""sets of edits that a worker keeps ready; others are decoded again when a request brings them"""
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


class WorkerState:
    """One worker's part of an engine."""

    def __init__(self, worker: Any, *, declared: bool = False) -> None:
        self.declared = declared
        """True if the points are part of compiled code"""
        self.worker, self.model, self.runner = worker, worker.get_model(), worker.model_runner
        self.requests: dict[str, Request] = {}
        self.recordings: dict[str, RecordedRows] = {}
        self.points: dict[str, PointActions] = {}
        self.is_trying = False
        self._layouts: dict[str, ValueLayout] = {}
        self._known_edits: dict[str, dict[str, list[RowEdit]]] = {}
        self._rows: list[RequestRows] | None = None
        self._step_rows = rows_of(self.runner)
        config = worker.vllm_config
        self.workers, self.width = config.parallel_config.tensor_parallel_size, config.model_config.get_hidden_size()
        learn_meanings(self.model)
        self._watch_steps()

    def close(self) -> None:
        """Remove everything from the worker. Declared points stay, and do nothing."""
        self.requests.clear()
        self.recordings.clear()
        for actions in self.points.values():
            actions.recordings.clear()
        if self.declared:
            return
        for actions in self.points.values():
            actions.close()
        self.points.clear()
        self._step_rows.close()
        del self.runner.execute_model

    # -- steps of the engine ------------------------------------------------------------------------------------------

    def _watch_steps(self) -> None:
        run = self.runner.execute_model

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run"):
                return run(scheduled, *args, **kwargs)
            self._begin(scheduled)
            try:
                return run(scheduled, *args, **kwargs)
            finally:
                self._rows = []

        self.runner.execute_model = execute_model
        self._rows = []

    def _begin(self, scheduled: Any) -> None:
        for name in scheduled.finished_req_ids:
            self.requests.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            given = (getattr(new.sampling_params, "extra_args", None) or {}).get(KEY)
            if given is not None and new.req_id not in self.requests:
                self.requests[new.req_id] = self._request(new, given)
        self._rows = None if self.requests else []
        if self.requests:
            for actions in self.points.values():
                actions.start()

    def _request(self, new: Any, given: dict[str, Any]) -> Request:
        prompt = len(new.prompt_token_ids) if new.prompt_token_ids is not None else len(new.prompt_embeds)
        name = given["request"]
        # Samples of one prompt are numbered in front of the id: 0_NAME-…, 1_NAME-….
        before, _, after = new.req_id.partition("_")
        sample = int(before) if not new.req_id.startswith(f"{name}-") and after.startswith(name) else 0
        open_now = [each for each in given["recordings"] if each in self.recordings]
        edits = [self._edits(data) for data in given["edits"]]
        made = Request(name, sample, prompt, new.num_computed_tokens, open_now, edits)
        facts = {"name": name, "sample": sample, "prompt": prompt, "cached": made.cached}
        for each in open_now:
            self.recordings[each].requests[new.req_id] = facts
        return made

    def rows_now(self) -> list[RequestRows]:
        """Return the rows of our requests in the current step; empty if there are none, or if no step runs."""
        if self._rows is None:
            self._rows = [rows for rows in self._step_rows.now() if rows.request in self.requests]
        return self._rows

    # -- points -------------------------------------------------------------------------------------------------------

    def points_of(self, selectors: list[str]) -> list[str]:
        """Return the addresses that selectors match."""
        return [str(point) for point in served_points(self.model, selectors)]

    def _use(self, selectors: list[str]) -> list[PointActions]:
        """Return the actions at the points that the selectors match. New points are installed, all or none."""
        found = served_points(self.model, selectors)
        if self.declared or not self.worker.model_config.enforce_eager:
            return self._use_declared(found)
        new = {str(point): PointActions(self, point) for point in found if str(point) not in self.points}
        failed = self._try(new)
        explicit = [failed[str(point)] for point in found if str(point) in failed and point.explicit]
        if explicit or len(failed) == len(found):
            for actions in new.values():
                actions.close()
            raise explicit[0] if explicit else next(iter(failed.values()))
        for address in failed:
            new.pop(address).close()
        self.points |= new
        return [self.points[str(point)] for point in found if str(point) in self.points]

    def _use_declared(self, found: list[Point]) -> list[PointActions]:
        """Return the actions at points of compiled code, or raise if one was not declared."""
        missing = next((str(point) for point in found if str(point) not in self.points), None)
        if missing is not None:
            known = f"It has {listed(list(self.points), 3)}." if self.points else "None was declared."
            raise SessionError(COMPILED.format(address=missing, there=known))
        used = [self.points[str(point)] for point in found]
        failed = self._try({actions.address: actions for actions in used if actions.layout is None})
        if failed:
            raise next(iter(failed.values()))
        return used

    def _try(self, new: dict[str, PointActions]) -> dict[str, AddressError]:
        """Install points and run the model on a few tokens, to learn the layout of their values. Return the errors."""
        failed: dict[str, AddressError] = {}
        for address, actions in new.items():
            actions.layout = self._layouts.get(address)
        try:
            for actions in new.values():
                actions.start()
            if all(actions.layout is not None for actions in new.values()):
                return failed
            self.is_trying = True
            self.runner._dummy_run(TOKENS)  # noqa: SLF001  # as the worker itself does, in execute_dummy_batch
        except BaseException:
            for actions in new.values():
                actions.close()
            raise
        finally:
            self.is_trying = False
        for address, actions in new.items():
            try:
                actions.layout = self._layouts[address] = self._layout(actions.point, actions.seen)
            except AddressError as error:
                failed[address] = error
            actions.seen = []
        return failed

    def _layout(self, point: Point, seen: list[Any]) -> ValueLayout:
        layout = layout_of(point, seen)
        if self.workers > 1 and point.meaning not in BY_HEADS:
            refuse_divided(point, layout, self.workers, self.width)
        return layout

    def described(self) -> dict[str, Any]:
        """Return what the values of this worker depend on."""
        config = self.worker.model_config
        return {
            "class": type(self.model).__name__,
            "weights": weights_of(self.model),
            "config": config.hf_config.to_json_string(use_diff=False),
            "dtype": str(config.dtype),
            "quantization": config.quantization,
        }

    # -- recordings ---------------------------------------------------------------------------------------------------

    def record(self, name: str, selectors: list[str]) -> list[str]:
        """Begin to record the requests that name this recording. Return the addresses."""
        used = self._use(selectors)
        wanted = [actions for actions in used if self._keeps(actions)]
        self.recordings[name] = RecordedRows([actions.address for actions in used])
        for actions in wanted:
            actions.recordings.append(name)
        return self.recordings[name].points

    def _keeps(self, actions: PointActions) -> bool:
        """Return whether this worker keeps the rows: the first one, or all for a value that is divided by heads."""
        return self.worker.rank == 0 or actions.point.meaning in BY_HEADS

    def take(self, name: str, address: str) -> dict[str, Any]:
        """Return rows of a point that were recorded since the last call, and whether there are more."""
        return self.recordings[name].take(address)

    def end(self, name: str) -> None:
        """End a recording. Points that nothing uses are removed."""
        del self.recordings[name]
        for actions in self.points.values():
            if name in actions.recordings:
                actions.recordings.remove(name)
        for request in self.requests.values():
            if name in request.recordings:
                request.recordings.remove(name)
        self._drop_unused()

    def _drop_unused(self) -> None:
        if self.declared:
            return
        live = [edits for request in self.requests.values() for edits in request.edits]
        edited = {address for edits in (*self._known_edits.values(), *live) for address in edits}
        for address, actions in list(self.points.items()):
            if not actions.recordings and address not in edited:
                del self.points[address]
                actions.close()

    # -- edits --------------------------------------------------------------------------------------------------------

    def check_edits(self, data: dict[str, Any]) -> list[str]:
        """Prepare edits, or raise if they do not fit. Return the addresses of their points."""
        return list(self._edits(data))

    def _edits(self, data: dict[str, Any]) -> dict[str, list[RowEdit]]:
        digest = data["digest"]
        known = self._known_edits.pop(digest, None)
        if known is None:
            known = self._prepared(data)
        self._known_edits[digest] = known  # The most recently used one is the last.
        if len(self._known_edits) > EDIT_SETS:
            del self._known_edits[next(iter(self._known_edits))]
            self._drop_unused()
        return known

    def _prepared(self, data: dict[str, Any]) -> dict[str, list[RowEdit]]:
        made: dict[str, list[RowEdit]] = {}
        for selector in row_edits(data):
            for actions in self._use([selector]):
                layout = actions.layout
                if layout is None:
                    continue
                if self.workers > 1:
                    refuse_divided(actions.point, layout, self.workers, self.width)
                example = layout.tensor if layout.is_sum else layout.value
                fitting = [_at(edit, actions.address) for edit in row_edits(data, layout.tensor)[selector]]
                for edit in fitting:
                    try_edit(edit, example)
                made.setdefault(actions.address, []).extend(fitting)
        return made


def _at(edit: RowEdit, address: str) -> RowEdit:
    """Return an edit that was given for a pattern, at one of its points."""
    edit.address = address
    return edit
