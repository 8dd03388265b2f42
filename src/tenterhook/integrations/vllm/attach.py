"""``attach``: an engine of vLLM with the verbs of tenterhook."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from tenterhook.errors import HarvestError, SessionError
from tenterhook.harvest.engine_job import HarvestEngine, ServedRequest
from tenterhook.integrations.vllm.admission import Admission, OwnEdits
from tenterhook.integrations.vllm.messages import answered
from tenterhook.integrations.vllm.request_tape import EngineTape
from tenterhook.integrations.vllm.row_edits import EditData, edit_data
from tenterhook.integrations.vllm.worker_state import KEY

__all__ = ["AsyncEngine", "Engine", "attach"]

PrefixCache = Literal["bypass", "use"]
NO_EXTENSION = (
    "the workers of this engine have no tenterhook in them. Start the engine with "
    'LLM(..., worker_extension_cls="tenterhook.integrations.vllm.Worker", enforce_eager=True).'
)
PARALLEL = "an engine with pipeline or data parallelism is not supported: use tensor parallelism only"
NOT_AN_ENGINE = "attach() takes an LLM or an AsyncLLM of vLLM; got a {kind}"
CLOSED = "this engine is closed. Attach again: attach(llm)"


def attach(llm: Any) -> Engine | AsyncEngine:
    """Return an engine with the verbs ``record``, ``edit`` and ``params``.

    Args:
        llm: an ``LLM``, an ``LLMEngine`` or an ``AsyncLLM`` that was started with
            ``worker_extension_cls="tenterhook.integrations.vllm.Worker"``.

    Returns:
        An :class:`Engine`, or an :class:`AsyncEngine` for an ``AsyncLLM``.

    Raises:
        SessionError: the engine was started without the extension, is attached already, or uses pipeline or data
            parallelism.
        TypeError: it is not an engine.
    """
    inner = getattr(llm, "llm_engine", llm)
    if not hasattr(inner, "input_processor") or not hasattr(inner, "collective_rpc"):
        raise TypeError(NOT_AN_ENGINE.format(kind=type(llm).__name__))
    if inner.vllm_config.parallel_config.worker_extension_cls != "tenterhook.integrations.vllm.Worker":
        raise SessionError(NO_EXTENSION)
    config = inner.vllm_config.parallel_config
    if config.pipeline_parallel_size > 1 or config.data_parallel_size > 1:
        raise SessionError(PARALLEL)
    return Engine(llm, inner) if hasattr(inner, "step") else AsyncEngine(inner)


class _Engine:
    """The part that both kinds of engine share."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.admission = Admission(inner.input_processor)
        self.speculative = inner.vllm_config.speculative_config is not None
        self.is_open = True

    def _check_open(self) -> None:
        if not self.is_open:
            raise SessionError(CLOSED)

    def record(self, *selectors: Any, prefix_cache: PrefixCache = "bypass") -> EngineRecording:
        """Record the values at points, for the requests that are admitted in the block.

        Args:
            *selectors: addresses and globs, such as ``"model.layers.*@resid"``.
            prefix_cache: ``"bypass"``: these requests do not read the prefix cache, so that every token is computed.
                ``"use"``: tokens from the cache are not computed and have no values.

        Returns:
            A session: ``with engine.record(...) as tape:``, or ``async with`` for an asynchronous engine.
        """
        if not selectors:
            raise SessionError('name the points to record: engine.record("model.layers.*@resid")')
        if prefix_cache not in ("bypass", "use"):
            raise ValueError(f'prefix_cache= is "bypass" or "use"; got {prefix_cache!r}')
        return EngineRecording(self, [str(each) for each in selectors], bypass=prefix_cache == "bypass")

    def edit(self, edits: Mapping[Any, Any]) -> EngineEditing:
        """Edit the values of all requests that are admitted in the block, from their first token to their last.

        Args:
            edits: a dict of address to ready edit, or to a list of them, as for ``th.edit``. ``at=`` selects tokens of
                each request: ``th.at[3]``, ``th.at[-1]`` (the last one of the prompt), ``th.at[8:]``. ``#{3..}`` at
                the end of an address means the steps from the third one on.

        Returns:
            A session: ``with engine.edit(...):``, or ``async with`` for an asynchronous engine.
        """
        return EngineEditing(self, edit_data(edits))

    def _with_edits(self, sampling: Any, data: EditData) -> Any:
        own = OwnEdits(data)
        own.rows, own.admission = data.rows, id(self.admission)
        made = sampling.clone()
        made.extra_args = {**(sampling.extra_args or {}), KEY: own}
        return made


class Engine(_Engine, HarvestEngine):
    """An engine of vLLM, with the verbs of tenterhook. ``th.harvest`` takes it in place of a model."""

    def __init__(self, llm: Any, inner: Any) -> None:
        super().__init__(inner)
        self._llm = llm
        try:
            self.call("attach")
        except BaseException:
            self.close()
            raise

    def call(self, verb: str, *args: Any) -> list[Any]:
        """Ask all workers, and return their answers."""
        self._check_open()
        return answered(self._inner.collective_rpc("tenterhook", args=(verb, *args)))

    def points(self, *selectors: str) -> list[str]:
        """Return the addresses that selectors match in the model of the workers; all outputs of modules by default."""
        return list(self.call("points_of", list(selectors) or ["**"])[0])

    def params(self, sampling: Any, *, edits: Mapping[Any, Any]) -> Any:
        """Return sampling parameters for requests with edits of their own.

        Args:
            sampling: the ``SamplingParams``; they are not changed.
            edits: a dict as for :meth:`edit`, such as what ``th.load_edits`` returns.

        Raises:
            AddressError: a point does not exist in the model.
            EditError: an edit does not fit the value at its point, or cannot be applied per request.
        """
        data = edit_data(edits)
        self.call("check_edits", dict(data))
        return self._with_edits(sampling, data)

    # -- for th.harvest -----------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Return what the values of this engine depend on: the model, its weights, and the open edits."""
        facts: dict[str, Any] = self.call("described")[0]
        weights = [each["weights"] for each in self.call("described")]
        return {**facts, "weights": weights, "edits": [data.digest for data in self.admission.edits]}

    def resolved(self, selectors: Sequence[Any]) -> list[str]:
        """Return the addresses that selectors match."""
        return self.points(*(str(each) for each in selectors))

    def serve(self, prompts: Sequence[Any], points: Sequence[str], options: Mapping[str, Any]) -> list[ServedRequest]:
        """Run prompts and return their values, in the order of the prompts.

        ``max_new_tokens`` is the number of tokens to generate; other options are those of ``SamplingParams``.
        """
        from vllm import SamplingParams

        if not hasattr(self._llm, "generate"):
            raise HarvestError("th.harvest needs an engine that was attached as an LLM: attach(llm)")
        defaults = {"temperature": 0, "max_new_tokens": 1, "detokenize": False}
        most = (wanted := defaults | dict(options)).pop("max_new_tokens")
        sampling = SamplingParams(max_tokens=most, **wanted)
        given = [each if isinstance(each, str) else {"prompt_token_ids": list(each)} for each in prompts]
        with self.record(*points) as tape:
            outputs = self._llm.generate(given, sampling, use_tqdm=False)
        return [_served(tape, output) for output in outputs]

    def close(self) -> None:
        """Remove everything from the engine, which continues to serve. Any number of times."""
        if self.is_open:
            self.admission.close()
            try:
                self.call("detach")
            finally:
                self.is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncEngine(_Engine):
    """An asynchronous engine of vLLM, with the verbs of tenterhook."""

    async def call(self, verb: str, *args: Any) -> list[Any]:
        """Ask all workers, and return their answers."""
        self._check_open()
        return answered(await self._inner.collective_rpc("tenterhook", args=(verb, *args)))

    async def points(self, *selectors: str) -> list[str]:
        """Return the addresses that selectors match, as :meth:`Engine.points` does."""
        return list((await self.call("points_of", list(selectors) or ["**"]))[0])

    async def params(self, sampling: Any, *, edits: Mapping[Any, Any]) -> Any:
        """Return sampling parameters for requests with edits of their own, as :meth:`Engine.params` does."""
        data = edit_data(edits)
        await self.call("check_edits", dict(data))
        return self._with_edits(sampling, data)

    async def close(self) -> None:
        """Remove everything from the engine, which continues to serve. Any number of times."""
        if self.is_open:
            self.admission.close()
            try:
                await self.call("detach")
            finally:
                self.is_open = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _served(tape: EngineTape, output: Any) -> ServedRequest:
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    return ServedRequest(tokens, len(output.prompt_token_ids), dict(tape.request(output)))


class _EngineSession:
    """A block of an engine. Both kinds of engine open and close it with the same two questions to the workers."""

    engine: Any

    def _refuse(self, wanted: type, how: str) -> None:
        if not isinstance(self.engine, wanted):
            raise SessionError(f"this is an {type(self.engine).__name__}: open its sessions with '{how}'")

    def close(self) -> None:
        """End the block; any number of times."""
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineRecording(_EngineSession):
    """A recording of requests. ``engine.record`` creates it."""

    def __init__(self, engine: Any, selectors: list[str], *, bypass: bool) -> None:
        self.engine, self._selectors, self._bypass = engine, selectors, bypass
        self.name = secrets.token_hex(8)
        self.tape: EngineTape | None = None

    def start(self) -> EngineTape:
        """Begin to record."""
        self._refuse(Engine, "async with")
        return self._begin(self.engine.call("record", self.name, self._selectors), self._fetch)

    def close(self) -> None:
        """Fetch the remaining rows, and end."""
        if self._ends() and self.tape is not None:
            self._fetch()
            self.engine.call("end", self.name)
            self.tape.end()

    def _begin(self, answers: list[Any], fetch: Any) -> EngineTape:
        self.tape = EngineTape(answers[0], fetch, speculative=self.engine.speculative)
        self.engine.admission.recordings[self.name] = self._bypass
        return self.tape

    def _ends(self) -> bool:
        """Mark no more requests, and return whether this was still open."""
        return self.engine.admission.recordings.pop(self.name, None) is not None

    def _fetch(self) -> None:
        if self.tape is not None:
            for address in self.tape.points:
                while self.tape.add(address, self.engine.call("take", self.name, address)):
                    pass

    def __enter__(self) -> EngineTape:
        return self.start()

    async def __aenter__(self) -> EngineTape:
        self._refuse(AsyncEngine, "with")
        return self._begin(await self.engine.call("record", self.name, self._selectors), None)

    async def __aexit__(self, *_: object) -> None:
        if self._ends() and self.tape is not None:
            for address in self.tape.points:
                while self.tape.add(address, await self.engine.call("take", self.name, address)):
                    pass
            await self.engine.call("end", self.name)
            self.tape.end()


class EngineEditing(_EngineSession):
    """Edits of all requests. ``engine.edit`` creates it."""

    def __init__(self, engine: Any, data: EditData) -> None:
        self.engine, self.data = engine, data

    def start(self) -> Self:
        """Begin to edit."""
        self._refuse(Engine, "async with")
        self.engine.call("check_edits", dict(self.data))
        self.engine.admission.edits.append(self.data)
        return self

    def close(self) -> None:
        """End. Requests that were admitted before keep their edits."""
        held = self.engine.admission.edits
        held[:] = [each for each in held if each is not self.data]

    def __enter__(self) -> Self:
        return self.start()

    async def __aenter__(self) -> Self:
        self._refuse(AsyncEngine, "with")
        await self.engine.call("check_edits", dict(self.data))
        self.engine.admission.edits.append(self.data)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
