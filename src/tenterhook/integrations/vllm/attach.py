"""``attach``: an engine of vLLM with the verbs of tenterhook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

from tenterhook.errors import ClosedSession, EditError, HarvestError, SelectorError, SessionError
from tenterhook.harvest.engine_job import HarvestEngine, ServedRequest
from tenterhook.integrations.vllm.admission import Admission, OwnEdits
from tenterhook.integrations.vllm.engine_limits import refuse_engine
from tenterhook.integrations.vllm.engine_sessions import EngineEditing, EngineRecording
from tenterhook.integrations.vllm.messages import answered
from tenterhook.integrations.vllm.request_tape import EngineTape
from tenterhook.integrations.vllm.row_edits import EditData, edit_data
from tenterhook.integrations.vllm.worker_state import KEY

__all__ = ["AsyncEngine", "Engine", "attach"]

PrefixCache = Literal["bypass", "use"]
NOT_AN_ENGINE = "attach() takes an LLM or an AsyncLLM of vLLM; got a {kind}"
NOT_TEXT = 'the points of an engine are named by text, such as "model.layers.*@resid"; got a {kind}'
NOT_SAMPLING = (
    "engine.params() takes the SamplingParams of one request; got a {kind}. Each request with edits of its own gets "
    "its own: [engine.params(sampling, edits=each) for each in ...]"
)
OPTIONS = {
    "n": "a harvest stores one sample of each prompt. For more, give the prompt several times",
    "max_tokens": "as for models, the number of tokens to generate is max_new_tokens",
}
CLOSED = "this engine is closed. Attach again: attach(llm)"


def attach(llm: Any) -> Engine | AsyncEngine:
    """Return an engine with the verbs ``record``, ``edit`` and ``params``.

    Args:
        llm: an ``LLM``, an ``LLMEngine`` or an ``AsyncLLM`` that was started with
            ``worker_extension_cls="tenterhook.integrations.vllm.Worker"``.

    Returns:
        An :class:`Engine`, or an :class:`AsyncEngine` for an ``AsyncLLM``.

    Raises:
        SessionError: the engine was started without the extension, is attached already, or runs in a way in which rows
            have no known request, such as pipeline parallelism.
        TypeError: it is not an engine.
    """
    inner = getattr(llm, "llm_engine", llm)
    if not hasattr(inner, "input_processor") or not hasattr(inner, "collective_rpc"):
        raise TypeError(NOT_AN_ENGINE.format(kind=type(llm).__name__))
    refuse_engine(inner.vllm_config)
    return Engine(llm, inner) if hasattr(inner, "step") else AsyncEngine(inner)


class _Engine:
    """The part that both kinds of engine share."""

    is_async = False

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.open_recordings: list[EngineRecording] = []
        self.admission = Admission(inner.input_processor)
        self.speculative = inner.vllm_config.speculative_config is not None
        self.is_open = True

    def _check_open(self) -> None:
        if not self.is_open:
            raise ClosedSession(CLOSED)

    def _is_running(self) -> bool:
        """Return whether the engine has requests that are not finished."""
        return bool(self._inner.output_processor.has_unfinished_requests())

    def record(self, *selectors: Any, prefix_cache: PrefixCache = "bypass") -> EngineRecording:
        """Record the values at points, for the requests that are admitted in the block.

        Args:
            *selectors: addresses and globs as text, such as ``"model.layers.*@resid"``, or lists of them.
            prefix_cache: ``"bypass"``: these requests do not read the prefix cache, so that every token is computed.
                ``"use"``: tokens from the cache are not computed and have no values.

        Returns:
            A session: ``with engine.record(...) as tape:``, or ``async with`` for an asynchronous engine.
        """
        named = _texts(selectors)
        if not named:
            raise SessionError('name the points to record: engine.record("model.layers.*@resid")')
        if prefix_cache not in ("bypass", "use"):
            raise ValueError(f'prefix_cache= is "bypass" or "use"; got {prefix_cache!r}')
        return EngineRecording(self, named, bypass=prefix_cache == "bypass")

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
        if not hasattr(sampling, "extra_args"):
            raise TypeError(NOT_SAMPLING.format(kind=type(sampling).__name__))
        if KEY in (sampling.extra_args or {}):
            raise EditError("these sampling parameters have edits already. Give all edits in one dict")
        own = OwnEdits(data)
        own.rows, own.admission = data.rows, self.admission
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
        """Return the addresses that selectors match in the model of the workers; all outputs of modules by default.

        An engine that runs compiled code has its declared points only.
        """
        return list(self.call("points_of", _texts(selectors) or ["**"])[0])

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
        workers: list[dict[str, Any]] = self.call("described")
        edits = [each.data.digest for each in self.admission.edits]
        for each in self.admission.edits:
            each.accept_no_request()
        return {**workers[0], "weights": [each["weights"] for each in workers], "edits": edits}

    def resolved(self, selectors: Sequence[Any]) -> list[str]:
        """Return the addresses that selectors match."""
        return list(self.call("usable", _texts(selectors))[0])

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise HarvestError if ``SamplingParams`` does not take these options, or if they ask for several samples."""
        _sampling(options)

    def serve(self, prompts: Sequence[Any], points: Sequence[str], options: Mapping[str, Any]) -> list[ServedRequest]:
        """Run prompts and return their values, in the order of the prompts.

        ``max_new_tokens`` is the number of tokens to generate; other options are those of ``SamplingParams``.
        """
        if not hasattr(self._llm, "generate"):
            raise HarvestError("th.harvest needs an engine that was attached as an LLM: attach(llm)")
        sampling = _sampling(options)
        given = [each if isinstance(each, str) else {"prompt_token_ids": list(each)} for each in prompts]
        with self.record(*points) as tape, self._aborting():
            outputs = self._llm.generate(given, sampling, use_tqdm=False)
        mine = set(tape.requests)  # Requests that were added before the call are also among the outputs.
        return [_served(tape, output) for output in outputs if output.request_id in mine]

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Abort the requests of the block if it is interrupted; otherwise the next call would run them."""
        running = self._inner.output_processor.request_states
        before = set(running)
        try:
            yield
        except BaseException:
            self._inner.abort_request([each for each in running if each not in before], internal=True)
            raise

    def close(self) -> None:
        """End the open blocks, and remove everything from the engine, which continues to serve. Any number of times.

        Requests that still run keep their edits to their last token.
        """
        if not self.is_open:
            return
        self.admission.close()
        try:
            for recording in reversed(self.open_recordings):
                recording.close()
            self.call("detach", self._is_running())
        finally:
            self.is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncEngine(_Engine):
    """An asynchronous engine of vLLM, with the verbs of tenterhook."""

    is_async = True

    async def call(self, verb: str, *args: Any) -> list[Any]:
        """Ask all workers, and return their answers."""
        self._check_open()
        return answered(await self._inner.collective_rpc("tenterhook", args=(verb, *args)))

    async def points(self, *selectors: str) -> list[str]:
        """Return the addresses that selectors match, as :meth:`Engine.points` does."""
        return list((await self.call("points_of", _texts(selectors) or ["**"]))[0])

    async def params(self, sampling: Any, *, edits: Mapping[Any, Any]) -> Any:
        """Return sampling parameters for requests with edits of their own, as :meth:`Engine.params` does."""
        data = edit_data(edits)
        await self.call("check_edits", dict(data))
        return self._with_edits(sampling, data)

    async def close(self) -> None:
        """End the open blocks, and remove everything from the engine, as :meth:`Engine.close` does."""
        if not self.is_open:
            return
        self.admission.close()
        try:
            for recording in reversed(self.open_recordings):
                await recording.close_async()
            await self.call("detach", self._is_running())
        finally:
            self.is_open = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _sampling(options: Mapping[str, Any]) -> Any:
    """Return the sampling parameters of a harvest's requests."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMError

    wrong = [name for name in ("n", "max_tokens") if name in options]
    if wrong:
        raise HarvestError(f"generate={{{wrong[0]!r}: ...}}: {OPTIONS[wrong[0]]}")
    given = {"temperature": 0, "max_new_tokens": 1, "detokenize": False} | dict(options)
    try:
        return SamplingParams(max_tokens=given.pop("max_new_tokens"), **given)
    except (TypeError, ValueError, VLLMError) as error:
        raise HarvestError(f"generate={dict(options)!r}: {error}") from error


def _texts(selectors: Sequence[Any]) -> list[str]:
    """Return selectors as texts, which are what a worker understands. The model is not in this process."""
    found: list[str] = []
    for each in selectors:
        if isinstance(each, list | tuple):
            found += _texts(each)
        elif isinstance(each, str):
            found.append(each)
        else:
            raise SelectorError(NOT_TEXT.format(kind=type(each).__name__))
    return found


def _served(tape: EngineTape, output: Any) -> ServedRequest:
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    return ServedRequest(tokens, len(output.prompt_token_ids), dict(tape.request(output)))
