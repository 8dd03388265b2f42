"""Values: a recorded value must equal the value that the model used."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import torch
from torch import Tensor, nn

from hazards.cases.base import Chain, Residual, Wrapped, X, case, seeded
from hazards.tools import Call, Tool, same


def _hidden_add(inner: nn.Module, x: Tensor) -> Tensor:
    out = inner(x)
    out += x
    return out  # type: ignore[no-any-return]


@case("Values", "an in-place activation follows")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.ReLU(inplace=True)))
    with torch.no_grad():
        return same(tool.value(model, "0", Call(model, X)), model[0](X))


@case("Values", "`out += identity` follows")
def _(tool: Tool) -> bool:
    model = seeded(Residual)
    with torch.no_grad():
        return same(tool.value(model, "inner", Call(model, X)), model.inner(X))


@case("Values", "the same, in code that gives no sign of it beforehand")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), _hidden_add))
    with torch.no_grad():
        return same(tool.value(model, "inner", Call(model, X)), model.inner(X))


@case("Values", "the same in inference mode, where tensors have no version")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), _hidden_add))
    with torch.inference_mode():
        return same(tool.value(model, "inner", Call(model, X)), model.inner(X))


@case("Values", "a module is called three times: all calls, or a question which one")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), lambda inner, x: inner(inner(inner(x)))))
    found = tool.value(model, "inner", Call(model, X))
    return isinstance(found, list | tuple) and len(found) == 3


Pair = namedtuple("Pair", ["first", "second"])


@case("Values", "a named tuple with None in it")
def _(tool: Tool) -> bool:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Pair(x * 2, None)

    model = Wrapped(Named(), lambda inner, x: inner(x).first)
    found = tool.value(model, "inner", Call(model, X))
    return type(found) is Pair and same(found.first, X * 2) and found.second is None


@case("Values", "another library's hook replaces the output")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), lambda inner, x: inner(x)))
    model.inner.register_forward_hook(lambda _m, _a, out: out * 10)
    with torch.no_grad():
        return same(tool.value(model, "inner", Call(model, X)), model(X))


@case("Values", "dropout under a seed gives what it gives without a recording")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.Dropout()))
    torch.manual_seed(3)
    plain = model(X)
    torch.manual_seed(3)
    return same(tool.value(model, "2", Call(model, X)), plain)


@case("Values", "a child of a transformer layer that would run as one fused kernel")
def _(tool: Tool) -> bool:
    model = seeded(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)).eval()
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = tool.value(model, "linear1", Call(model, x))
        attended = model.norm1(x + model.self_attn(x, x, x, need_weights=False)[0])
        return same(found, model.linear1(attended))


@case("Values", "`nn.MultiheadAttention.out_proj`, which is never called")
def _(tool: Tool) -> bool:
    model = seeded(lambda: nn.MultiheadAttention(4, 2))
    x = torch.randn(2, 3, 4)
    return tool.value(model, "out_proj", Call(model, x, x, x)) is not None


@dataclasses.dataclass
class Record:
    """A value that is a dataclass."""

    y: Tensor
    rest: tuple[Tensor, dict[str, Tensor]]


@case("Values", "a dataclass with a nested structure in it, changed in place afterwards")
def _(tool: Tool) -> bool:
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Record:
            return Record(x * 2, (x * 3, {"z": x * 4}))

    class After(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Nested()

        def forward(self, x: Tensor) -> Tensor:
            found = self.inner(x)
            found.rest[1]["z"].zero_()
            return found.y  # type: ignore[no-any-return]

    model = After()
    found = tool.value(model, "inner", Call(model, X))
    return type(found) is Record and same(found.rest[1]["z"], X * 4)


@case("Values", "batch norm in training updates its statistics once, as without a recording")
def _(tool: Tool) -> bool:
    model, plain = (seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))) for _ in range(2))
    plain(X)
    tool.value(model, "0", Call(model, X))
    return same(model[1].running_mean, plain[1].running_mean) and int(model[1].num_batches_tracked) == 1
