"""The cases. Each takes a tool and tells whether what it got is right; an exception is a refusal, which is loud."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hazards.tools import Tool, same

__all__ = ["CASES", "Case"]

Case = tuple[str, str, Callable[[Tool], bool]]
CASES: list[Case] = []


def case(section: str, sentence: str) -> Callable[[Callable[[Tool], bool]], Callable[[Tool], bool]]:
    """Register a case under a section, with the sentence that the table shows."""

    def registered(function: Callable[[Tool], bool]) -> Callable[[Tool], bool]:
        CASES.append((section, sentence, function))
        return function

    return registered


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same weights every time."""
    torch.manual_seed(0)
    return make()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Chain(nn.Sequential):
    """A linear layer, an in-place activation, and another linear layer."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__(nn.Linear(4, 4), activation, nn.Linear(4, 4))


class Wrapped(nn.Module):
    """A model made of one inner module and a function around it."""

    def __init__(self, inner: nn.Module, around: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self._around = inner, around

    def forward(self, x: Tensor) -> Any:
        return self._around(self.inner, x)


class Residual(nn.Module):
    """A residual sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        out += x
        return out  # type: ignore[no-any-return]


def _hidden_add(inner: nn.Module, x: Tensor) -> Tensor:
    out = inner(x)
    out += x
    return out  # type: ignore[no-any-return]


# --- values -----------------------------------------------------------------------------------------------------------


@case("Values", "an in-place activation follows")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.ReLU(inplace=True)))
    with torch.no_grad():
        return same(tool.value(model, "0", lambda: model(X)), model[0](X))


@case("Values", "`out += identity` follows")
def _(tool: Tool) -> bool:
    model = seeded(Residual)
    with torch.no_grad():
        return same(tool.value(model, "inner", lambda: model(X)), model.inner(X))


@case("Values", "the same, in code that gives no sign of it beforehand")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), _hidden_add))
    with torch.no_grad():
        return same(tool.value(model, "inner", lambda: model(X)), model.inner(X))


@case("Values", "the same in inference mode, where tensors have no version")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), _hidden_add))
    with torch.inference_mode():
        return same(tool.value(model, "inner", lambda: model(X)), model.inner(X))


@case("Values", "a module is called three times: all calls, or a question which one")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), lambda inner, x: inner(inner(inner(x)))))
    found = tool.value(model, "inner", lambda: model(X))
    return isinstance(found, list | tuple) and len(found) == 3


Pair = namedtuple("Pair", ["first", "second"])


@case("Values", "a named tuple with None in it")
def _(tool: Tool) -> bool:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Pair(x * 2, None)

    model = Wrapped(Named(), lambda inner, x: inner(x).first)
    found = tool.value(model, "inner", lambda: model(X))
    return type(found) is Pair and same(found.first, X * 2) and found.second is None


@case("Values", "another library's hook replaces the output")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), lambda inner, x: inner(x)))
    model.inner.register_forward_hook(lambda _m, _a, out: out * 10)
    with torch.no_grad():
        return same(tool.value(model, "inner", lambda: model(X)), model(X))


@case("Values", "dropout under a seed gives what it gives without a recording")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.Dropout()))
    torch.manual_seed(3)
    plain, results = model(X), []
    torch.manual_seed(3)
    tool.value(model, "0", lambda: results.append(model(X)))
    return same(results[0], plain)


@case("Values", "a child of a transformer layer that would run as one fused kernel")
def _(tool: Tool) -> bool:
    model = seeded(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)).eval()
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = tool.value(model, "linear1", lambda: model(x))
        attended = model.norm1(x + model.self_attn(x, x, x, need_weights=False)[0])
        return same(found, model.linear1(attended))


@case("Values", "`nn.MultiheadAttention.out_proj`, which is never called")
def _(tool: Tool) -> bool:
    model = seeded(lambda: nn.MultiheadAttention(4, 2))
    x = torch.randn(2, 3, 4)
    return tool.value(model, "out_proj", lambda: model(x, x, x)) is not None


# --- gradients --------------------------------------------------------------------------------------------------------


class Exp(nn.Module):
    """Several operations: y = exp(w x) + b."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.exp(w * x) + b


@case("Gradients", "the input's gradient of a module of many operations")
def _(tool: Tool) -> bool:
    x, w, b = (torch.tensor([v], requires_grad=True) for v in (1.0, 2.0, 3.0))
    model = Wrapped(Exp(), lambda inner, x: inner(x, w, b).sum())
    return same(tool.input_gradient(model, "inner", lambda: model(x)), 2 * torch.exp(torch.tensor([2.0])))


@case("Gradients", "the output is changed in place afterwards")
def _(tool: Tool) -> bool:
    def after(inner: nn.Module, x: Tensor) -> Tensor:
        out = inner(x)
        out *= 3
        return out.sum()

    model = seeded(lambda: Wrapped(nn.Linear(4, 4), after))
    return same(tool.gradient(model, "inner", lambda: model(X)), torch.full((3, 4), 3.0))


@case("Gradients", "the module itself works in place")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.ReLU(inplace=True)))
    x = X.clone().requires_grad_()
    hidden = model[0](x).detach().requires_grad_()
    truth = torch.autograd.grad(model[2](hidden.relu()).sum(), hidden)[0]
    return same(tool.input_gradient(model, "1", lambda: model(x).sum()), truth)


@case("Gradients", "the output is a view and is changed in place")
def _(tool: Tool) -> bool:
    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).view(-1)

    def after(inner: nn.Module, x: Tensor) -> Tensor:
        out = inner(x)
        out *= 3
        return out.sum()

    model = Wrapped(View(), after)
    x = X.clone().requires_grad_()
    return same(tool.gradient(model, "inner", lambda: model(x)), torch.full((12,), 3.0))


@case("Gradients", "the output is a dict")
def _(tool: Tool) -> bool:
    class Dict(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": x * 2}

    model = Wrapped(Dict(), lambda inner, x: (inner(x)["y"] * 5).sum())
    found = tool.gradient(model, "inner", lambda: model(X.clone().requires_grad_()))
    return same(found["y"] if isinstance(found, dict) else found, torch.full((3, 4), 5.0))


@case("Gradients", "the input is given as a keyword")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), lambda inner, x: inner(input=x).sum()))
    found = tool.input_gradient(model, "inner", lambda: model(X.clone().requires_grad_()))
    return same(found, model.inner.weight.sum(0).expand(3, 4))


@case("Gradients", "the input is used elsewhere too: only what flows through this module")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), lambda inner, x: (inner(x) + x * 7).sum()))
    found = tool.input_gradient(model, "inner", lambda: model(X.clone().requires_grad_()))
    return same(found, model.inner.weight.sum(0).expand(3, 4))


@case("Gradients", "a module that returns its input, in a residual")
def _(tool: Tool) -> bool:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            return (x * 5 + self.inner(x) * 2).sum()

    model = Passing()
    found = tool.gradient(model, "inner", lambda: model(X.clone().requires_grad_()))
    return same(found, torch.full((3, 4), 2.0))


# --- recomputation ----------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two layers, the first of them checkpointed."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second, self._reentrant = Chain(nn.Tanh()), nn.Linear(4, 1), reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x) if self._reentrant is None else checkpoint(self.first, x, use_reentrant=self._reentrant)
        return self.second(inner).sum()  # type: ignore[union-attr]


def _edited_gradients(tool: Tool, *, reentrant: bool) -> bool:
    def gradients(*, kind: bool | None) -> list[Tensor | None]:
        model = seeded(lambda: Checkpointed(reentrant=kind))
        loss = tool.edit(model, "first.1", lambda out: out * 0.5, lambda: model(X.clone().requires_grad_()))
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    return all(same(one, other) for one, other in zip(gradients(kind=reentrant), gradients(kind=None), strict=True))


@case("Recomputation", "an edit under activation checkpointing, its session closed before `backward()`")
def _(tool: Tool) -> bool:
    return _edited_gradients(tool, reentrant=False)


@case("Recomputation", "the same, reentrant")
def _(tool: Tool) -> bool:
    return _edited_gradients(tool, reentrant=True)


@case("Recomputation", "the gradient inside a reentrant checkpoint")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Checkpointed(reentrant=True))
    plain = seeded(lambda: Checkpointed(reentrant=None))
    hidden = torch.tanh(plain.first[0](X)).detach().requires_grad_()
    truth = torch.autograd.grad(plain.second(plain.first[2](hidden)).sum(), hidden)[0]
    return same(tool.gradient(model, "first.1", lambda: model(X.clone().requires_grad_())), truth)


# --- life cycle -------------------------------------------------------------------------------------------------------


def _hooks(model: nn.Module) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = sum("forward" in vars(module) for module in model.modules())
    return own + sum(len(getattr(module, table)) for module in model.modules() for table in tables)


@case("Life cycle", "an exception in `forward` leaves nothing behind")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.ReLU()))
    with contextlib.suppress(Exception):
        tool.value(model, "0", lambda: model(torch.ones(1, 3)))
    return _hooks(model) == 0


@case("Life cycle", "a point that is never reached is said")
def _(tool: Tool) -> bool:
    model = Wrapped(nn.Linear(4, 4), lambda _inner, x: x)
    tool.edit(model, "inner", lambda out: out * 0, lambda: model(X))
    return False  # Nothing was said.


@case("Life cycle", "another thread uses the model meanwhile")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), lambda inner, x: inner(x)))

    def run() -> None:
        model(X)
        thread = threading.Thread(target=lambda: model(X * 0))
        thread.start()
        thread.join()

    with torch.no_grad():
        return same(tool.value(model, "inner", run), model(X))


@case("Life cycle", "a copy made meanwhile runs its own weights")
def _(tool: Tool) -> bool:
    model, copies = seeded(Residual), []

    def run() -> None:
        copies.append(copy.deepcopy(model))
        model(X)

    with torch.no_grad():
        tool.value(model, "inner", run)
        copies[0].inner.weight.zero_()
        copies[0].inner.bias.zero_()
        return same(copies[0](X), X)


@case("Life cycle", "a pickle made meanwhile loads, and is the same model")
def _(tool: Tool) -> bool:
    model, texts = seeded(lambda: Chain(nn.Tanh())), []

    def run() -> None:
        texts.append(pickle.dumps(model))
        model(X)

    tool.value(model, "0", run)
    again = pickle.loads(texts[0])
    return list(again.state_dict()) == list(model.state_dict()) and same(again(X), model(X))
