"""The worker of an engine that runs compiled code: it adds an operator at each declared point before vLLM compiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.platforms import current_platform

from tenterhook.address import Site
from tenterhook.errors import SessionError
from tenterhook.integrations.vllm.point_actions import PointActions
from tenterhook.integrations.vllm.served_points import served_points
from tenterhook.integrations.vllm.worker import Worker
from tenterhook.integrations.vllm.worker_state import KEY, WorkerState, running_step

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

__all__ = ["CompiledWorker"]

FULL_GRAPHS = (
    "an engine with declared points cannot use full CUDA graphs, which run no Python code in a step. Start it with "
    "LLM(model, **declare(...)), which sets compilation_config={'cudagraph_mode': 'PIECEWISE'}."
)
NO_POINTS = (
    "this worker needs the points that are part of its code. Start the engine with LLM(model, **declare(...)), or with "
    'the same options: additional_config={"tenterhook": {"points": [...]}}.'
)
NOT_OUTPUT = "{address!r} cannot be declared: in compiled code, points are outputs of modules and their meanings."


@torch.library.custom_op("tenterhook::served", mutates_args=("value",))
def served(value: Tensor, index: int) -> None:
    """Edit and record a value in place."""
    _act(index, value)


@torch.library.custom_op("tenterhook::served_pair", mutates_args=("value", "residual"))
def served_pair(value: Tensor, residual: Tensor, index: int) -> None:
    """Edit and record a value that is kept as two tensors, in place."""
    _act(index, (value, residual))


def _act(index: int, value: Any) -> None:
    """Act at a point of the engine that runs now. The compiled code of several engines may be the same."""
    state = running_step.state
    if state is not None:
        state.declared_points[index].in_place(value)


@served.register_fake
def _(value: Tensor, index: int) -> None:
    pass


@served_pair.register_fake
def _(value: Tensor, residual: Tensor, index: int) -> None:
    pass


# The extension is among its bases, because vLLM adds it to the platform's worker if this process ran an engine before.
class CompiledWorker(PlatformWorker, Worker):  # type: ignore[misc]  # the class of the platform's worker is unknown here
    """The platform's worker, with the declared points in its model."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and add the operators."""
        super().load_model(*args, **kwargs)
        if self.model_config.enforce_eager:
            return  # All points are available.
        compilation = self.vllm_config.compilation_config
        if compilation.cudagraph_mode is not None and compilation.cudagraph_mode.has_full_cudagraphs():
            raise SessionError(FULL_GRAPHS)
        if compilation.splitting_ops:
            compilation.splitting_ops += ["tenterhook::served", "tenterhook::served_pair"]
        self.tenterhook_state = state = WorkerState(self, declared=True)
        named = (self.vllm_config.additional_config or {}).get(KEY, {}).get("points")
        if not named:
            raise SessionError(NO_POINTS)
        points = served_points(state.model, named)
        state.declared_points = [PointActions(state, point) for point in dict.fromkeys(points)]
        for index, actions in enumerate(state.declared_points):
            if actions.point.site is not Site.RETURN:
                raise SessionError(NOT_OUTPUT.format(address=actions.address))
            state.points[actions.address] = actions
            _add_operator(actions.point.module, index)


def _add_operator(module: nn.Module, index: int) -> None:
    """Call the operator with what the module returns. Dynamo traces this function."""
    forward = module.forward

    def with_operator(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        found = [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]
        if len(found) == 1:
            torch.ops.tenterhook.served(found[0], index)
        elif len(found) == 2:  # noqa: PLR2004  # Other outputs are refused when they are used: no operator is reached.
            torch.ops.tenterhook.served_pair(found[0], found[1], index)
        return output

    module.forward = with_operator
