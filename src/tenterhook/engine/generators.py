"""Edited parameters for generators and coroutines that a forward returns.

Their body runs after the forward has returned, so the parameters are installed again for each step of the body.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenterhook.engine.module_actions import ModuleActions
    from tenterhook.sites.parameter import Exchange

__all__ = ["stepwise"]

Inside = Callable[[], AbstractContextManager[None]]
LAZY = (map, filter, zip, enumerate)


def stepwise(value: Any, action_sets: list[ModuleActions]) -> Any:
    """Return the output of a forward; if it is a generator or coroutine, install the edited parameters at each step."""
    pairs = [(actions, swap) for actions in action_sets for swap in actions.swaps]
    if not pairs:
        return value

    def inside() -> AbstractContextManager[None]:
        return _entered([swap for actions, swap in pairs if not actions.over])

    made: Any
    if inspect.isgenerator(value):
        made = _steps(value, inside)
    elif inspect.iscoroutine(value):
        made = _awaited(value, inside)
    elif inspect.isasyncgen(value):
        return _async_steps(value, inside)
    elif isinstance(value, LAZY):
        return _steps((each for each in value), inside)
    else:
        return value
    made.__name__, made.__qualname__ = value.__name__, value.__qualname__
    return made


@contextmanager
def _entered(swaps: list[Exchange]) -> Iterator[None]:
    entered: list[Exchange] = []
    try:
        for swap in swaps:
            entered.append(swap)
            swap.enter()
        yield
    finally:
        for swap in reversed(entered):
            swap.leave()


def _steps(body: Any, inside: Inside) -> Generator[Any, Any, Any]:
    """Return the same generator, with each step run inside the context manager."""
    resume, given = body.send, None
    while True:
        try:
            with inside():
                item = resume(given)
        except StopIteration as end:
            return end.value
        try:
            resume, given = body.send, (yield item)
        except GeneratorExit:
            with inside():
                body.close()
            raise
        except BaseException as error:  # noqa: BLE001 - the body decides what becomes of it
            resume, given = body.throw, error


_driven = types.coroutine(_steps)


async def _awaited(body: Coroutine[Any, Any, Any], inside: Inside) -> Any:
    return await _driven(body, inside)


async def _async_steps(body: AsyncGenerator[Any, Any], inside: Inside) -> AsyncGenerator[Any, Any]:
    step: Any = body.asend(None)
    while True:
        try:
            item = await _driven(step, inside)
        except StopAsyncIteration:
            return
        try:
            step = body.asend((yield item))
        except GeneratorExit:
            await _driven(body.aclose(), inside)
            raise
        except BaseException as error:  # noqa: BLE001 - the body decides what becomes of it
            step = body.athrow(error)
