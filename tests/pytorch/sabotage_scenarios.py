"""Scenarios: what users do with tenterhook, each beside a truth that plain PyTorch gives without it.

A scenario is a function that builds a model and computes the truth, both before tenterhook is imported. It returns the
truth and a function that does the same with tenterhook.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import nn

__all__ = ["SCENARIOS", "Net", "Scenario", "by_hand", "gradients_of", "made", "scenario"]

X = torch.linspace(-1, 1, 12, dtype=torch.float64, device="cpu").reshape(3, 4)


class Scenario(NamedTuple):
    """A truth, and the function that must give the same with tenterhook."""

    truth: Any
    run: Callable[[Any], Any]
    models: tuple[nn.Module, ...]


SCENARIOS: dict[str, tuple[Callable[[], Scenario], bool]] = {}
"""Each scenario's function, and whether it needs a compiler or another slow part of PyTorch."""


def scenario(name, *, slow=False):
    def register(function):
        SCENARIOS[name] = (function, slow)
        return function

    return register


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        inner = self.lin(x)
        return torch.tanh(inner) + x


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Block(), Block(), nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.blocks(x))

    def blocks(self, x):
        return self.second(self.first(x))


class Checkpointed(Net):
    """The same, with the blocks inside checkpoints of these kinds, outermost first."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds

    def forward(self, x):
        run = self.blocks
        for reentrant in reversed(self.kinds):
            run = _checkpointed(run, reentrant)
        return self.head(run(x))


def _checkpointed(function, reentrant):
    return lambda x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant)


def made(kinds=()):
    return Checkpointed(kinds) if kinds else Net(), X.clone().requires_grad_()


def same(value):
    return value


def by_hand(model, x, first=same, second=same, weight=same):
    """The model, written out with functions: every value, with its gradient function."""
    own = dict(model.named_parameters())
    inner = F.linear(x, weight(own["first.lin.weight"]), own["first.lin.bias"])
    one = first(torch.tanh(inner) + x)
    two = second(torch.tanh(F.linear(one, own["second.lin.weight"], own["second.lin.bias"])) + one)
    out = F.linear(two, own["head.weight"], own["head.bias"])
    return {"first.lin": inner, "first": one, "second:in": one, "second": two, ":return": out}


def loss_of(out):
    return out.pow(2).sum()


def gradients_of(model, x, **changes):
    """The gradients of all parameters and of the input, by hand."""
    loss = loss_of(by_hand(model, x, **changes)[":return"])
    names, tensors = zip(*model.named_parameters(), strict=True)
    return dict(zip((*names, "x"), torch.autograd.grad(loss, (*tensors, x)), strict=True))


def gradients_in(model, x):
    """Take the gradients that a backward pass has left, and leave none."""
    found = {**{name: each.grad for name, each in model.named_parameters()}, "x": x.grad}
    x.grad = None
    for each in model.parameters():
        each.grad = None
    return found


# -- values ------------------------------------------------------------------------------------------------------------


@scenario("record")
def record():
    model, x = made()
    truth = {name: value.detach() for name, value in by_hand(model, x).items()}

    def run(th):
        with th.record(model, *truth) as tape:
            model(x)
        return {name: tape[name] for name in truth}

    return Scenario(truth, run, (model,))


@scenario("record inside a forward")
def record_inside():
    model, x = made()
    values = by_hand(model, x)
    truth = {"first:inner": values["first.lin"].detach(), "first:tanh()": torch.tanh(values["first.lin"]).detach()}

    def run(th):
        with th.record(model, *truth) as tape:
            model(x)
        return {name: tape[name] for name in truth}

    return Scenario(truth, run, (model,))


class Pair:
    """A class that pytrees know, as the outputs of Hugging Face models are."""

    def __init__(self, one, other):
        self.one, self.other = one, other


torch.utils._pytree.register_pytree_node(
    Pair, lambda pair: ([pair.one, pair.other], None), lambda parts, _: Pair(*parts)
)


class Structured(nn.Module):
    def forward(self, x):
        return {"a": x * 2, "b": (Pair(x + 1, x - 1), None)}


@scenario("record structured values")
def record_structured():
    model = Structured()
    truth = [X * 2, X + 1, X - 1]

    def run(th):
        with th.record(model, ":return", copy="always") as tape:
            out = model(X)
            for part in (out["a"], out["b"][0].one, out["b"][0].other):
                part.zero_()
        kept = tape[":return"]
        return [kept["a"], kept["b"][0].one, kept["b"][0].other]

    return Scenario(truth, run, (model,))


@scenario("edit")
def edit():
    model, x = made()
    changed = by_hand(model, x, first=lambda v: v * 2, second=torch.sin)[":return"].detach()
    parameter = by_hand(model, x, weight=lambda w: w * w)[":return"].detach()

    def run(th):
        with th.edit(model, {"first": th.scale(2), "second": torch.sin}):
            one = model(x).detach()
        with th.edit(model, {"first.lin.weight": lambda w: w * w}):
            other = model(x).detach()
        return [one, other]

    return Scenario([changed, parameter], run, (model,))


@scenario("edit a recurrent layer's parameter")
def edit_recurrent():
    torch.manual_seed(0)
    model, x = nn.LSTM(4, 3, dtype=torch.float64), X[None]
    twin = nn.LSTM(4, 3, dtype=torch.float64)
    with torch.no_grad():
        for one, other in zip(twin.parameters(), model.parameters(), strict=True):
            one.copy_(other)
        twin.weight_hh_l0.mul_(3)
    truth = [twin(x)[0].detach(), model(x)[0].detach()]

    def run(th):
        with th.edit(model, {"weight_hh_l0": th.scale(3)}):
            edited = model(x)[0].detach()
        return [edited, model(x)[0].detach()]

    return Scenario(truth, run, (model,))


class Normalised(nn.Module):
    """A layer that is pruned, and one whose weight is normalised."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.pruned, self.normal = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)
        nn.utils.prune.l1_unstructured(self.pruned, "weight", amount=5)
        nn.utils.parametrizations.spectral_norm(self.normal)

    def forward(self, x):
        return self.pruned(x), self.normal(x)


@scenario("edit parameters from which others are computed")
def edit_normalised():
    model, twin = Normalised(), Normalised()
    twin(X)  # In training, each call refines the vectors of spectral normalisation.
    vectors = [buffer for name, buffer in twin.named_buffers() if name.startswith("normal.")]
    weight, mask = twin.pruned.weight_orig, twin.pruned.weight_mask
    truth = [F.linear(X, weight * 2 * mask, twin.pruned.bias).detach(), *vectors]

    def run(th):
        names = [name for name, _ in model.named_parameters() if "parametrizations" in name]
        changes = {"pruned.weight_orig": th.scale(2), next(iter(names)): th.add(1.0)}
        with th.edit(model, changes):
            pruned, _ = model(X)
        found = [buffer for name, buffer in model.named_buffers() if name.startswith("normal.")]
        return [pruned.detach(), *found]

    return Scenario(truth, run, ())


# -- gradients ---------------------------------------------------------------------------------------------------------


@scenario("gradients")
def gradients():
    model, x = made()
    values = by_hand(model, x)
    names = ["first.lin", "first", "second", ":return"]
    loss = loss_of(values[":return"])
    found = torch.autograd.grad(loss, [*(values[name] for name in names), model.head.weight])
    truth = [*found, found[1], gradients_of(model, x)]  # Nothing but the second block reads the first one's output.

    def run(th):
        with th.record(model, *names, "head.weight", "second:in", grad=True) as tape:
            loss_of(model(x)).backward()
        found = [tape.grad[name] for name in (*names, "head.weight", "second:in")]
        return [*found, gradients_in(model, x)]

    return Scenario(truth, run, (model,))


class ChangesAView(nn.Module):
    """Its child returns a view, which is changed in place afterwards, as is what it is a view of."""

    def __init__(self):
        super().__init__()
        self.part, self.same = Part(), nn.Identity()

    def forward(self, x):
        x = self.same(x * 3)
        view = self.part(x)
        view.mul_(view.detach() + 2)
        x.mul_(5)
        return view.sum() + (x**2).sum()


class Part(nn.Module):
    def forward(self, x):
        return x[:, 1:3]


@scenario("gradients of views that change")
def gradients_of_views():
    model, x = ChangesAView(), X.clone().requires_grad_()
    # By hand: all of it without in-place operations.
    value = X.clone().requires_grad_()
    part = value[:, 1:3] * 3
    part.retain_grad()
    changed = part * (part.detach() + 2) * 5
    whole = torch.cat([value[:, :1] * 15, changed, value[:, 3:] * 15], 1)
    (changed.sum() + (whole**2).sum()).backward()
    truth = [part.grad, value.grad]

    def run(th):
        with th.record(model, "part", grad=True) as tape:
            model(x).backward()
        found, x.grad = x.grad, None
        return [tape.grad["part"], found]

    return Scenario(truth, run, (model,))


class Returns(nn.Module):
    """A child that returns its input, which is used in two more places."""

    def __init__(self):
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x):
        x = x * 1
        return (self.same(x) ** 2).sum() + (x * 7).sum()


@scenario("gradients of a module that returns its input")
def gradients_of_identity():
    model, x = Returns(), X.clone().requires_grad_()
    truth = [2 * X, 2 * X, 2 * X + 7]

    def run(th):
        with th.record(model, "same", "same:in", grad=True) as tape:
            model(x).backward()
        found, x.grad = x.grad, None
        return [tape.grad["same"], tape.grad["same:in"], found]

    return Scenario(truth, run, (model,))


def _gradient_edit(value):
    out = value.view_as(value)
    out.register_hook(lambda g: g.clamp(-0.5, 0.5) * 3)
    return out


@scenario("edit a gradient")
def edit_gradient():
    model, x = made()
    truth = gradients_of(model, x, first=_gradient_edit)

    def run(th):
        with th.edit(model, grad={"first": lambda g: g.clamp(-0.5, 0.5) * 3}):
            loss_of(model(x)).backward()
        return gradients_in(model, x)

    return Scenario(truth, run, (model,))


# -- checkpoints -------------------------------------------------------------------------------------------------------

KINDS = {
    "reentrant": (True,),
    "non-reentrant": (False,),
    "reentrant in reentrant": (True, True),
    "non-reentrant in non-reentrant": (False, False),
    "non-reentrant in reentrant": (True, False),
    "reentrant in non-reentrant": (False, True),
}


@contextlib.contextmanager
def _without_checkpoint_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        yield


def _checkpointed_edit(kinds):
    def build():
        model, x = made(kinds)
        truth = gradients_of(model, x, first=lambda v: v * 2, second=torch.sin)

        def run(th):
            with _without_checkpoint_warnings():
                with th.edit(model, {"first": th.scale(2), "second": torch.sin}):
                    loss = loss_of(model(x))
                loss.backward()  # After the session was closed.
            return gradients_in(model, x)

        return Scenario(truth, run, (model,))

    return build


def _checkpointed_gradients(kinds):
    def build():
        model, x = made(kinds)
        values = by_hand(model, x, second=torch.sin)
        truth = [
            *torch.autograd.grad(loss_of(values[":return"]), [values["first"], values["first.lin"]]),
            gradients_of(model, x, second=torch.sin),
        ]

        def run(th):
            with _without_checkpoint_warnings(), th.edit(model, {"second": torch.sin}):
                with th.record(model, "first", "first.lin", grad=True) as tape:
                    loss_of(model(x)).backward()
            return [tape.grad["first"], tape.grad["first.lin"], gradients_in(model, x)]

        return Scenario(truth, run, (model,))

    return build


for _name, _kinds in KINDS.items():
    scenario(f"checkpointed edit, {_name}")(_checkpointed_edit(_kinds))
for _name in ("reentrant", "non-reentrant"):
    scenario(f"gradients in a checkpoint, {_name}")(_checkpointed_gradients(KINDS[_name]))
