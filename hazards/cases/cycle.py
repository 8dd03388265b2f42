"""The lifetime of hooks: registration, removal, and other hooks at the same time."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from typing import Any

import torch
from torch import nn

from hazards.cases.base import Chain, Residual, Wrapped, X, case, seeded
from hazards.tools import Call, Tool, Unable, same, torch_state


def _hooks(model: nn.Module) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = sum("forward" in vars(module) for module in model.modules())
    return own + sum(len(getattr(module, table)) for module in model.modules() for table in tables)


@case("Life cycle", "an exception in `forward` leaves nothing behind")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.ReLU()))
    with contextlib.suppress(Exception):
        tool.value(model, "0", Call(model, torch.ones(1, 3)))
    return _hooks(model) == 0


@case("Life cycle", "a point that is never reached is said")
def _(tool: Tool) -> bool:
    model = Wrapped(nn.Linear(4, 4), lambda _inner, x: x)
    tool.edit(model, "inner", lambda out: out * 0, Call(model, X))
    return False  # There was no error.


@case("Life cycle", "another thread uses the model meanwhile")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Wrapped(nn.Linear(4, 4), lambda inner, x: inner(x)))

    def meanwhile() -> None:
        thread = threading.Thread(target=lambda: model(X * 0))
        thread.start()
        thread.join()

    with torch.no_grad():
        return same(tool.value(model, "inner", Call(model, X, meanwhile=meanwhile)), model(X))


@case("Life cycle", "a copy made meanwhile runs its own weights")
def _(tool: Tool) -> bool:
    model: Any = seeded(Residual)
    copies: list[Any] = []
    with torch.no_grad():
        tool.value(model, "inner", Call(model, X, meanwhile=lambda: copies.append(copy.deepcopy(model))))
        copies[0].inner.weight.zero_()
        copies[0].inner.bias.zero_()
        return same(copies[0](X), X)


@case("Life cycle", "a pickle made meanwhile loads, and is the same model")
def _(tool: Tool) -> bool:
    model, texts = seeded(lambda: Chain(nn.Tanh())), []
    tool.value(model, "0", Call(model, X, meanwhile=lambda: texts.append(pickle.dumps(model))))
    again = pickle.loads(texts[0])
    return list(again.state_dict()) == list(model.state_dict()) and same(again(X), model(X))


@case("Life cycle", "of two names the second is unknown: nothing is left behind")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.ReLU()))
    try:
        tool.values(model, ["0", "nowhere"], Call(model, X))
    except Unable:
        raise
    except Exception:  # noqa: BLE001  # an error is the right answer
        return _hooks(model) == 0
    return False


@case("Life cycle", "hooks of others, the names of parameters and what they require stay")
def _(tool: Tool) -> bool:
    model, seen = seeded(lambda: Chain(nn.ReLU())), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    names = list(model.state_dict())
    tool.value(model, "0", Call(model, X))
    calls = len(seen)
    model(X)
    kept = list(model.state_dict()) == names and all(each.requires_grad for each in model.parameters())
    return kept and calls == 1 and len(seen) == calls + 1


@case("Life cycle", "PyTorch itself stays as it was before the library was imported")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.ReLU()))
    before = tool.began or torch_state()
    tool.value(model, "0", Call(model, X))
    now = torch_state()
    return all(now.get(name) == known for name, known in before.items())


@case("Compiled models", "hooked after the first compiled call")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.Tanh()))
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(X)
        return same(tool.value(model, "0", Call(compiled, X)), model[0](X))


@case("Compiled models", "edited after the first compiled call")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.Tanh()))
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(X)
        found = tool.edit(model, "1", lambda out: out * 0, Call(compiled, X))
        return same(found, model[2].bias.expand(3, 4)) and same(compiled(X), model(X))


@case("Compiled models", "an edit does not become part of what `torch.export` writes down")
def _(tool: Tool) -> bool:
    model = seeded(lambda: Chain(nn.Tanh()))
    programs: list[Any] = []
    export = Call(model, X, meanwhile=lambda: programs.append(torch.export.export(model, (X,))))
    tool.edit(model, "1", lambda out: out * 0, export)
    return same(programs[0].module()(X), model(X))
