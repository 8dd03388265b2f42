"""Gradients of outputs that are changed in place later, inside compiled graphs; the truth changes nothing in place."""

import random

import pytest
import torch
from compiled_toys import needs_traced_hooks
from torch import nn

import tenterhook as th

# Dynamo's own, as it looks at tensors with a history and at functions of autograd.
pytestmark = [
    needs_traced_hooks,
    pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated"),
]

# Each in-place operation, with the same out of place.
IN_PLACE = {
    "relu": (torch.relu_, torch.relu),
    "mul": (lambda x: x.mul_(1.5), lambda x: x * 1.5),
    "add": (lambda x: x.add_(0.5), lambda x: x + 0.5),
    "tanh": (torch.tanh_, torch.tanh),
    "part": (lambda x: (x[:, :2].mul_(3), x)[1], lambda x: torch.cat([x[:, :2] * 3, x[:, 2:]], 1)),
    "none": (lambda x: x, lambda x: x),
}


class Chain(nn.Module):
    """Layers whose outputs are changed, in place or not, before the next layer; some outputs are added again later."""

    def __init__(self, steps, again, *, in_place):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4).double() for _ in steps])
        self.steps, self.again, self.place = steps, again, 0 if in_place else 1
        self.kept = []

    def forward(self, x):
        self.kept, sums = [], 0
        for number, (layer, step) in enumerate(zip(self.layers, self.steps, strict=True)):
            x = layer(x)
            if self.place:
                self.kept.append(x)
            x = IN_PLACE[step][self.place](x)
            if number in self.again:
                sums = sums + x
        return x + sums


def drawn(seed):
    draw = random.Random(seed)
    steps = draw.choices(list(IN_PLACE), k=draw.randint(2, 4))
    again = draw.sample(range(len(steps)), k=draw.randint(0, 2))
    torch.manual_seed(seed)
    model, truth = Chain(steps, again, in_place=True), Chain(steps, again, in_place=False)
    truth.load_state_dict(model.state_dict())
    return model, truth, torch.randn(3, 4, dtype=torch.float64, requires_grad=True), draw


def expected(truth, x, scaled):
    """The gradients of the layers' outputs; that of one layer is multiplied as it passes back."""
    out = truth(x)
    for value in truth.kept:
        value.retain_grad()
    if scaled is not None:
        truth.kept[scaled].register_hook(lambda gradient: gradient * 3)
    out.pow(2).sum().backward()
    return [value.grad for value in truth.kept], [p.grad for p in truth.parameters()], x.grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("seed", range(5))
def test_gradients_before_in_place_operations_are_right_in_one_graph(seed, backend):
    model, truth, x, draw = drawn(seed)
    scaled = draw.choice([None, draw.randrange(len(truth.steps))])
    gradients, parameters, given = expected(truth, x, scaled)
    x.grad = None
    names = [f"layers.{number}" for number in range(len(model.layers))]
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    edit = {} if scaled is None else {names[scaled]: th.scale(3.0)}
    session = th.record(model, *names, grad=True)
    if edit:
        with th.edit(model, grad=edit), session as tape:
            compiled(x).pow(2).sum().backward()
    else:
        with session as tape:
            compiled(x).pow(2).sum().backward()
    for name, truly in zip(names, gradients, strict=True):
        assert torch.allclose(tape.grad[name], truly), name
    assert all(torch.allclose(p.grad, truly) for p, truly in zip(model.parameters(), parameters, strict=True))
    assert torch.allclose(x.grad, given)
    assert session.compiled.graphs == 1
    assert session.compiled.breaks == 0


def test_a_second_session_uses_the_graph_of_the_first():
    model, _, x, _ = drawn(3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(3):
        session = th.record(model, "layers.0", grad=True)
        with session as tape:
            compiled(x).sum().backward()
        assert tape.grad["layers.0"].shape == (3, 4)
    assert session.compiled.recompilations == 0


def test_the_gradient_of_a_module_that_returns_its_input_is_that_of_its_own_uses():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.same = nn.Linear(4, 4), nn.Identity()

        def forward(self, x):
            h = self.first(x)
            return h * 2 + self.same(h) * 3

    model, x = Net(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with th.record(model, "first", "same", grad=True) as tape:
        compiled(x).sum().backward()
    assert torch.equal(tape.grad["same"], torch.full((3, 4), 3.0))
    assert torch.equal(tape.grad["first"], torch.full((3, 4), 5.0))
