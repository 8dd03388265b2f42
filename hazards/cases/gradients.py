"""Gradients, in one pass and in recomputation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hazards.cases.base import Chain, Wrapped, X, case, seeded
from hazards.tools import Call, Tool, same


class Exp(nn.Module):
    """Several operations: y = exp(w x) + b."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.exp(w * x) + b


@case("Gradients", "the input's gradient of a module of many operations")
def _(tool: Tool) -> bool:
    x, w, b = (torch.tensor([v], requires_grad=True) for v in (1.0, 2.0, 3.0))
    model = Wrapped(Exp(), lambda inner, x: inner(x, w, b).sum())
    return same(tool.input_gradient(model, "inner", Call(model, x)), 2 * torch.exp(torch.tensor([2.0])))


@case("Gradients", "the output is changed in place afterwards")
def _(tool: Tool) -> bool:
    def after(inner: nn.Module, x: Tensor) -> Tensor:
        out = inner(x)
        out *= 3
        return out.sum()

    model = seeded(lambda: Wrapped(nn.Linear(4, 4), after))
    return same(tool.gradient(model, "inner", Call(model, X)), torch.full((3, 4), 3.0))


@case("Gradients", "the module itself works in place")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.ReLU(inplace=True)))
    x = X.clone().requires_grad_()
    hidden = model[0](x).detach().requires_grad_()
    truth = torch.autograd.grad(model[2](hidden.relu()).sum(), hidden)[0]
    return same(tool.input_gradient(model, "1", Call(model, x, loss=torch.sum)), truth)


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
    return same(tool.gradient(model, "inner", Call(model, x)), torch.full((12,), 3.0))


@case("Gradients", "the output is a dict")
def _(tool: Tool) -> bool:
    class Dict(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": x * 2}

    model = Wrapped(Dict(), lambda inner, x: (inner(x)["y"] * 5).sum())
    found = tool.gradient(model, "inner", Call(model, X.clone().requires_grad_()))
    return same(found["y"] if isinstance(found, dict) else found, torch.full((3, 4), 5.0))


@case("Gradients", "the input is given as a keyword")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), lambda inner, x: inner(input=x).sum()))
    found = tool.input_gradient(model, "inner", Call(model, X.clone().requires_grad_()))
    return same(found, model.inner.weight.sum(0).expand(3, 4))


@case("Gradients", "the input is used elsewhere too: the gradient through this module only")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), lambda inner, x: (inner(x) + x * 7).sum()))
    found = tool.input_gradient(model, "inner", Call(model, X.clone().requires_grad_()))
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
    found = tool.gradient(model, "inner", Call(model, X.clone().requires_grad_()))
    return same(found, torch.full((3, 4), 2.0))


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
        loss = tool.edit(model, "first.1", lambda out: out * 0.5, Call(model, X.clone().requires_grad_()))
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
    return same(tool.gradient(model, "first.1", Call(model, X.clone().requires_grad_())), truth)
