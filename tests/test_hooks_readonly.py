"""Read-only hooks: every change is an error that names the changed object."""

import dataclasses
import random
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook import hooks


@dataclasses.dataclass
class Out:
    y: object
    more: object = None


class Model(nn.Module):
    """A module that returns its input structure beside its result."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)

    def forward(self, x, *, state):
        return Out(self.linear(x), {"state": state, "list": [x * 2, (x, "text")]})


def given():
    return {
        "numbers": [1, 2.5, float("nan"), None],
        "tensors": {"a": torch.ones(2), "b": (torch.zeros(3),)},
        "set": {1, 2},
        "queue": deque([torch.ones(1)]),
        "ordered": OrderedDict(k=[torch.ones(1)]),
        "object": SimpleNamespace(v=[1]),
        "data": Out(torch.ones(2)),
        "array": np.zeros(3),
    }


@torch.no_grad()
def halve(tensor):
    tensor.mul_(0.5)


# Each changes one object that a forward hook can reach.
CHANGES = {
    "an item of a dict": lambda m, a, k, o: o.more.update(new=1),
    "a deleted item": lambda m, a, k, o: o.more.pop("list"),
    "a list": lambda m, a, k, o: o.more["list"].append(3),
    "an element": lambda m, a, k, o: k["state"]["numbers"].__setitem__(0, 7),
    "the order of a list": lambda m, a, k, o: k["state"]["numbers"].reverse(),
    "a tensor in a tuple": lambda m, a, k, o: halve(o.more["list"][1][0]),
    "a tensor for another": lambda m, a, k, o: k["state"]["tensors"].update(a=torch.ones(2)),
    "a set": lambda m, a, k, o: k["state"]["set"].add(3),
    "a queue": lambda m, a, k, o: k["state"]["queue"].appendleft(3),
    "a nested list": lambda m, a, k, o: k["state"]["ordered"]["k"].clear(),
    "an attribute": lambda m, a, k, o: setattr(k["state"]["object"], "v", 2),
    "a field of a dataclass": lambda m, a, k, o: setattr(o, "y", o.y * 1),
    "a field of a dataclass in a keyword": lambda m, a, k, o: setattr(k["state"]["data"], "more", 1),
    "an array": lambda m, a, k, o: k["state"]["array"].fill(1),
    "the output": lambda m, a, k, o: halve(o.y),
    "the input": lambda m, a, k, o: halve(a[0]),
    "the data of the output": lambda m, a, k, o: o.y.data.add_(1),
    "the data of a keyword": lambda m, a, k, o: k["state"]["tensors"]["b"][0].data.add_(1),
    "other data": lambda m, a, k, o: setattr(o.y, "data", torch.zeros(4, 2)),
    "memory through NumPy": lambda m, a, k, o: k["state"]["tensors"]["a"].numpy().fill(3),
    "two elements exchanged": lambda m, a, k, o: o.y.data.copy_(o.y.data.flip(0)),
    "a parameter": lambda m, a, k, o: halve(m.linear.weight),
    "the data of a parameter": lambda m, a, k, o: m.linear.bias.data.add_(1),
    "another parameter": lambda m, a, k, o: setattr(m.linear, "weight", nn.Parameter(torch.zeros(2, 3))),
    "a buffer": lambda m, a, k, o: m.norm.running_mean.data.add_(1),
}


def run(model, hook):
    hooks.register_forward_hook(model, lambda *args: (hook(*args), None)[1], with_kwargs=True, readonly=True)
    return model(torch.randn(4, 3), state=given())


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_anything_that_a_forward_hook_reaches_is_an_error(what):
    with pytest.raises(th.ReadonlyHook, match="changed"):
        run(Model(), CHANGES[what])


def test_a_hook_that_reads_everything_is_no_trouble():
    out = run(Model(), lambda m, a, k, o: [str(value) for value in (dict(m.named_parameters()), a, k, o)])
    assert out.y.shape == (4, 2)


@pytest.mark.parametrize("kind", ["backward", "backward_pre"])
@pytest.mark.parametrize(
    "change", [lambda m, g: m.weight.data.zero_(), lambda m, g: g[0].data.zero_(), lambda m, g: halve(g[0])]
)
def test_a_backward_hook_changes_neither_gradients_nor_parameters(kind, change):
    module = nn.Linear(3, 2)
    getattr(hooks, f"register_{kind}_hook")(module, lambda m, *g: (change(m, g[-1]), None)[1], readonly=True)
    with pytest.raises(th.ReadonlyHook, match="changed"):
        module(torch.ones(1, 3, requires_grad=True)).pow(2).sum().backward()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int8]
)
def test_a_single_changed_number_is_found_in_every_type(dtype):
    draw = random.Random(0)
    for size in (1, 7, 5000):
        tensor = torch.ones(size).to(dtype)
        place = draw.randrange(size)
        module = nn.Identity()
        hooks.register_forward_hook(
            module,
            lambda m, a, o, place=place: o.data.view(-1)[place : place + 1].zero_() is None or None,
            readonly=True,
        )
        with pytest.raises(th.ReadonlyHook, match="in place"):
            module(tensor)
