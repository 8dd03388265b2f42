"""The newest calls that ``keep`` leaves on a tape are the same for values and gradients, in random runs.

Calls raise, call themselves, and return tensors in tuples or None. The truth is the order in which the model itself saw
its calls end.
"""

import contextlib
import random
from collections import defaultdict

import pytest
import torch
from torch import nn

import tenterhook as th


class Node(nn.Module):
    """A module that calls itself and a layer, and notes which calls ended and which assignments it made."""

    def __init__(self, name, draw, ended, children):
        super().__init__()
        self.name, self.draw, self.ended, self.begun = name, draw, ended, 0
        self.layer = nn.Linear(3, 3)
        self.below = nn.ModuleList(children)

    def forward(self, x, depth=0):
        call, self.begun = self.begun, self.begun + 1
        self.ended[f"{self.name}:in"].append(call)
        y = torch.tanh(self.layer(x))
        for child in self.below:
            y = y + first(child(y))
        if depth < 2 and self.draw.random() < 0.3:
            y = y + first(self(y, depth + 1))
        kind = self.draw.randrange(4)
        mark = None if kind == 0 else y * 2
        self.ended[f"{self.name}:mark"].append(len(self.ended[f"{self.name}:mark"]))
        if self.draw.random() < 0.15:
            raise ZeroDivisionError
        self.ended[self.name].append(call)
        shown = y if mark is None else mark
        return (y, None) if kind == 1 else (y, shown) if kind == 2 else y


def first(value):
    return value[0] if isinstance(value, tuple) else value


def net(seed):
    torch.manual_seed(seed)
    draw, ended = random.Random(seed), defaultdict(list)
    below = [Node(f"below.{number}", draw, ended, []) for number in range(2)]
    return Node("", draw, ended, below), ended


def run(model, times):
    for _ in range(times):
        x = torch.randn(2, 3, requires_grad=True)
        with contextlib.suppress(ZeroDivisionError):
            first(model(x)).sum().backward()


def calls_on(view, address):
    return sorted(view._tracks[address].entries) if address in view._tracks else []


def name_of(address):
    path, _, name = address.partition(":")
    return path if name in ("", "return") else f"{path}:{name}"


POINTS = [":return", ":in", ":mark", "below.0", "below.0:in", "below.0:mark", "below.1", "below.1:mark"]


@pytest.mark.parametrize("grad", [False, True, "total"])
@pytest.mark.parametrize("keep", ["last", 2, 5])
@pytest.mark.parametrize("seed", range(12))
def test_values_and_gradients_of_the_same_newest_calls_stay(seed, keep, grad):
    model, ended = net(seed)
    points = random.Random(f"{seed} {keep} {grad}").sample(POINTS, 4)
    with th.record(model, *points, grad=grad, keep=keep) as tape:
        run(model, 8)
    for point in points:
        newest = sorted(ended[name_of(point)][-(1 if keep == "last" else keep) :])
        assert calls_on(tape, point) == newest, point
        assert not grad or calls_on(tape.grad, point) == newest, point


@pytest.mark.parametrize("others", ["nothing", "another recording", "an edit", "a watch"])
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("keep", ["last", 3])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_calls_stay_beside_other_sessions(seed, keep, values, others):
    model, ended = net(seed)
    beside = {
        "another recording": lambda: th.record(model, "below.*", grad=True),
        "an edit": lambda: th.edit(model, {"below.0.layer": lambda value: value * 2}),
        "a watch": lambda: th.watch(model, "below.*"),
    }
    with th.record(model, "**", grad=True, values=values, keep=keep) as tape:
        run(model, 3)
        if others in beside:
            with beside[others]():
                run(model, 3)
        run(model, 3)
    for point in (":return", "below.0", "below.1"):
        newest = sorted(ended[name_of(point)][-(1 if keep == "last" else keep) :])
        assert calls_on(tape.grad, point) == newest, point
        assert not values or calls_on(tape, point) == newest, point


@pytest.mark.parametrize("keep", ["last", 2])
@pytest.mark.parametrize("seed", range(6))
def test_named_calls_of_one_module_are_all_kept(seed, keep):
    model = nn.Sequential(*[nn.Linear(3, 3)] * 4)
    torch.manual_seed(seed)
    calls = sorted(random.Random(seed).sample(range(4), 3))
    with th.record(model, *[f"0#{call}" for call in calls], grad=True, keep=keep) as tape:
        model(torch.randn(2, 3)).sum().backward()
    assert calls_on(tape, "0") == calls
    assert calls_on(tape.grad, "0") == calls


class Closing(nn.Module):
    """Closes a session in the middle of its call."""

    session = None

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        y = self.layer(x)
        if self.session is not None:
            self.session.close()
        return y


@pytest.mark.parametrize("points", [("layer", ":return"), ("layer", ":return", ":in", ":y")])
@pytest.mark.parametrize("handed_over", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("keep", ["all", "last", 2])
def test_a_call_in_flight_stores_nothing_after_the_end_of_its_session(keep, grad, handed_over, points):
    model, x = Closing(), torch.randn(2, 3)
    session = th.record(model, *points, grad=grad, keep=keep).start()
    if handed_over:
        with th.record(model, grad=grad):
            model(x)
    else:
        model(x)
    before = {point: calls_on(session.tape, point) for point in (":return", "layer")}
    model.session = session
    model(x)
    assert calls_on(session.tape, ":return") == before[":return"]
    assert calls_on(session.tape, "layer") == ([0, 1] if keep != "last" else [1])
    assert not grad or calls_on(session.tape.grad, ":return") == before[":return"]
