"""The state of one worker: the requests that it serves for us, its points, edits and recordings."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tenterhook.address import Point
from tenterhook.address.suggest import listed
from tenterhook.errors import AddressError, SessionError
from tenterhook.harvest.weights_digest import weights_of
from tenterhook.integrations.vllm.other_values import refuse_other_value
from tenterhook.integrations.vllm.point_actions import PointActions
from tenterhook.integrations.vllm.recorded_rows import RecordedRows, Request
from tenterhook.integrations.vllm.row_edits import RowEdit, row_edits, try_edit
from tenterhook.integrations.vllm.runner_rows import RequestRows, rows_of
from tenterhook.integrations.vllm.served_points import (
    BY_HEADS,
    ValueLayout,
    learn_meanings,
    refuse_divided,
    served_points,
)
from tenterhook.integrations.vllm.trial_run import TrialRun, layouts_of

__all__ = ["KEY", "WorkerState", "running_step"]

KEY = "tenterhook"
"""the entry of ours in the ``extra_args`` of a request's sampling parameters"""
COMPILED = (
    "{address!r}: this engine runs compiled code, in which points cannot be added after it started. {there} Start it "
    "with LLM(model, **declare({address!r})), or with enforce_eager=True for all points."
)
EDIT_SETS = 256
"""sets of edits that a worker keeps ready; others are decoded again when a request brings them"""


class RunningStep(threading.local):
    """The worker of which a thread runs a step now."""

    state: WorkerState | None = None

    @contextmanager
    def of(self, state: WorkerState) -> Iterator[None]:
        """Run a step of this worker."""
        before, self.state = self.state, state
        try:
            yield
        finally:
            self.state = before


running_step = RunningStep()


class WorkerState:
    """One worker's part of an engine."""

    def __init__(self, worker: Any, *, declared: bool = False) -> None:
        self.declared = declared
        """True if the points are part of compiled code"""
        self.worker, self.model, self.runner = worker, worker.get_model(), worker.model_runner
        self.requests: dict[str, Request] = {}
        self.recordings: dict[str, RecordedRows] = {}
        self.points: dict[str, PointActions] = {}
        self.declared_points: list[PointActions] = []
        """the points of compiled code, which knows them by their place here"""
        self.is_attached = False
        """True while an engine is attached. Otherwise marks are ignored, because a client may have made them."""
        self.trial: TrialRun | None = None
        """the run that learns the layout of values, while it runs"""
        self._layouts: dict[str, ValueLayout] = {}
        self._known_edits: dict[str, dict[str, list[RowEdit]]] = {}
        self._rows: list[RequestRows] | None = None
        self._step_rows = rows_of(self.runner)
        self.workers = worker.vllm_config.parallel_config.tensor_parallel_size
        learn_meanings(self.model)
        self._watch_steps()

    def close(self, is_running: bool = False) -> None:  # noqa: FBT001, FBT002  # the arguments of a call by RPC
        """Remove everything from the worker, as soon as no request runs. Declared points stay, and do nothing."""
        self.is_attached = False
        if is_running:
            return
        self.requests.clear()
        self.recordings.clear()
        self._known_edits.clear()
        for actions in self.points.values():
            actions.recordings.clear()
        if self.declared:
            return
        for actions in self.points.values():
            actions.close()
        self.points.clear()
        self._step_rows.close()
        del self.runner.execute_model
        self.worker.tenterhook_state = None

    # -- steps of the engine ------------------------------------------------------------------------------------------

    def _watch_steps(self) -> None:
        run = self.runner.execute_model

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run"):
                return run(scheduled, *args, **kwargs)
            self._begin(scheduled)
            try:
                with self.step():
                    return run(scheduled, *args, **kwargs)
            finally:
                self._rows = []

        self.runner.execute_model = execute_model
        self._rows = []

    def _begin(self, scheduled: Any) -> None:
        for name in scheduled.finished_req_ids:
            self.requests.pop(name, None)
        if not self.is_attached and not self.requests and not self.declared:
            self.close()
        for new in scheduled.scheduled_new_reqs if self.is_attached else ():
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

    @property
    def _is_compiled(self) -> bool:
        return self.declared or not self.worker.model_config.enforce_eager

    def points_of(self, selectors: list[str]) -> list[str]:
        """Return the addresses that selectors match; in compiled code, those of declared points."""
        found = [str(point) for point in served_points(self.model, selectors)]
        return [address for address in found if address in self.points] if self._is_compiled else found

    def usable(self, selectors: list[str]) -> list[str]:
        """Return the addresses that selectors match, or raise if one of them cannot be recorded."""
        return [actions.address for actions in self._use(selectors)]

    def _use(self, selectors: list[str]) -> list[PointActions]:
        """Return the actions at the points that the selectors match. New points are installed, all or none."""
        found = served_points(self.model, selectors)
        if self._is_compiled:
            return self._use_declared(found)
        new = {str(point): PointActions(self, point) for point in found if str(point) not in self.points}
        failed = self._try(new)
        # All layers of "*@resid" or none, but of "**" those that have rows.
        named = [point for point in found if point.explicit or point.meaning is not None]
        explicit = [failed[str(point)] for point in named if str(point) in failed]
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
        """Install points and learn the layout of their values. Return the errors."""
        try:
            for actions in new.values():
                actions.start()
            unknown = {address: actions.point for address, actions in new.items() if address not in self._layouts}
            found = layouts_of(self, unknown) if unknown else {}
        except BaseException:
            for actions in new.values():
                actions.close()
            raise
        failed: dict[str, AddressError] = {}
        for address, layout in found.items():
            try:
                self._layouts[address] = self._usable_layout(new[address].point, layout)
            except AddressError as error:
                failed[address] = error
        for address, actions in new.items():
            actions.layout = self._layouts.get(address)
        return failed

    def _usable_layout(self, point: Point, layout: ValueLayout | AddressError) -> ValueLayout:
        if isinstance(layout, AddressError):
            raise layout
        refuse_other_value(self.model, point, self.worker.model_config.dtype)
        if point.meaning not in BY_HEADS:
            refuse_divided(point, layout, self.workers)
        return layout

    def step(self) -> AbstractContextManager[None]:
        """Return the block of a step of this worker's model."""
        return running_step.of(self)

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
                refuse_divided(actions.point, layout, self.workers)
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
