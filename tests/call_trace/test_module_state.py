"""A call is served only if nothing that its forward may read has changed, wherever that is kept."""

import collections
import contextvars
import copy
import dataclasses
import functools
import itertools
import random
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th

X = torch.linspace(-1, 1, 8).view(2, 4)
SCALE = 1.0
SETTINGS = {"scale": [1.0, {"deep": 1.0}]}
TABLE = np.ones(4, np.float32)
CURRENT = contextvars.ContextVar("current", default=1.0)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@dataclasses.dataclass
class Options:
    scale: float = 1.0
    more: dict = dataclasses.field(default_factory=lambda: {"scale": [1.0]})


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Scaled(nn.Module):
    """Multiplies its input by what ``read`` finds."""

    by_class = 1.0
    held_by_class = {"scale": 1.0}  # noqa: RUF012  A shared mutable attribute is what is tried.

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.inner = nn.Linear(4, 4)
        self.array = np.ones(4, np.float32)
        self.nested = {"a": {"k": 1.0}, "list": [{"k": 1.0}, [1.0, [1.0]]]}
        self.options, self.slotted, self.plain = Options(), Slotted(), types.SimpleNamespace(inside=Options())
        self.queue = collections.deque([1.0, 2.0])
        self.arrays = {"deep": [np.ones(4, np.float32)]}
        self.numbers = bytearray([1])
        self.flag = 1
        self.memory = np.ones(4, np.float32)
        self.shared = torch.from_numpy(self.memory)
        self.register_buffer("kept", torch.ones(4))
        self.hidden = [{"linear": nn.Linear(4, 4)}]

    def helper(self):
        return SCALE

    @property
    def as_property(self):
        return self.options.more["scale"][0]

    def forward(self, x):
        return self.inner(x) * self.read(self)


def closure():
    scale, box = 1.0, {"scale": [1.0]}

    def read(_):
        return scale * box["scale"][0]

    def rebind():
        nonlocal scale
        scale = 3.0

    return read, rebind, box


def function_with_default(_, scale=[1.0]):  # noqa: B006  A default that can be changed is what is tried.
    return scale[0]


def scaled_by(options, _):
    return options["scale"]


def reads_constant(_):
    return 1.0


def changed_code(_):
    return 3.0


def put(target, key, value):
    target[key] = value


READ, REBIND, BOX = closure()
BOUND = {"scale": 1.0}

# A way to read, and ways to change what is read.
WAYS = {
    "a NumPy array": (lambda m: torch.from_numpy(m.array), [lambda m: m.array.fill(3), lambda m: put(m.array, 2, 5)]),
    "an array in containers": (lambda m: torch.tensor(m.arrays["deep"][0]), [lambda m: m.arrays["deep"][0].fill(3)]),
    "nested dicts": (
        lambda m: m.nested["a"]["k"],
        [lambda m: put(m.nested["a"], "k", 3.0), lambda m: put(m.nested, "a", {"k": 2.0})],
    ),
    "a dict in a list": (lambda m: m.nested["list"][0]["k"], [lambda m: put(m.nested["list"][0], "k", 3.0)]),
    "a list in a list": (lambda m: m.nested["list"][1][1][0], [lambda m: put(m.nested["list"][1][1], 0, 3.0)]),
    "a dataclass": (lambda m: m.options.scale, [lambda m: setattr(m.options, "scale", 3.0)]),
    "a dict in a dataclass": (lambda m: m.options.more["scale"][0], [lambda m: put(m.options.more["scale"], 0, 3.0)]),
    "an object in an object": (lambda m: m.plain.inside.scale, [lambda m: setattr(m.plain.inside, "scale", 3.0)]),
    "slots": (lambda m: m.slotted.scale, [lambda m: setattr(m.slotted, "scale", 3.0)]),
    "a deque": (lambda m: m.queue[0], [lambda m: m.queue.rotate(1)]),
    "bytes": (lambda m: m.numbers[0], [lambda m: put(m.numbers, 0, 3)]),
    "a class attribute": (lambda m: m.by_class, [lambda m: setattr(type(m), "by_class", 3.0)]),
    "a dict of the class": (lambda m: m.held_by_class["scale"], [lambda m: put(m.held_by_class, "scale", 3.0)]),
    "a global": (lambda m: SCALE, [lambda m: globals().update(SCALE=3.0)]),
    "a global in a method": (lambda m: m.helper(), [lambda m: globals().update(SCALE=3.0)]),
    "a method": (lambda m: m.helper(), [lambda m: setattr(type(m), "helper", changed_code)]),
    "a property": (lambda m: m.as_property, [lambda m: put(m.options.more["scale"], 0, 3.0)]),
    "a nested global": (lambda m: SETTINGS["scale"][1]["deep"], [lambda m: put(SETTINGS["scale"][1], "deep", 3.0)]),
    "a global array": (lambda m: torch.from_numpy(TABLE), [lambda m: TABLE.fill(3)]),
    "a closure": (READ, [lambda m: REBIND(), lambda m: put(BOX["scale"], 0, 3.0)]),
    "a default": (function_with_default, [lambda m: put(function_with_default.__defaults__[0], 0, 3.0)]),
    "code": (reads_constant, [lambda m: setattr(reads_constant, "__code__", changed_code.__code__)]),
    "a bound argument": (functools.partial(scaled_by, BOUND), [lambda m: put(BOUND, "scale", 3.0)]),
    "a context variable": (lambda m: CURRENT.get(), [lambda m: CURRENT.set(3.0)]),
    "shared memory": (lambda m: m.shared, [lambda m: m.memory.fill(3)]),
    "a buffer": (
        lambda m: m.kept,
        [
            lambda m: m.kept.fill_(3),
            lambda m: m.kept.data.fill_(3),
            lambda m: m.kept.numpy().fill(3),
            lambda m: m.kept.detach().numpy().__setitem__(1, 2),
            lambda m: setattr(m.kept, "data", torch.full((4,), 3.0)),
            lambda m: m.kept.set_(torch.full((4,), 3.0)),
        ],
    ),
    "a parameter": (
        lambda m: 1.0,
        [
            lambda m: m.inner.weight.data.copy_(m.inner.weight.flip(0)),
            lambda m: m.inner.weight.data.neg_(),
            lambda m: put(m.inner.weight.data, (1, 2), 7.0),
            lambda m: setattr(m.inner.weight, "data", torch.ones(4, 4)),
            lambda m: m.inner.bias.detach().numpy().fill(3),
        ],
    ),
    "a hidden module": (lambda m: m.hidden[0]["linear"](X), [lambda m: m.hidden[0]["linear"].weight.data.fill_(3)]),
    "a flag": (lambda m: 3.0 if m.flag is True else 1.0, [lambda m: setattr(m, "flag", True)]),
}  # fmt: skip
CASES = [(name, place) for name, (_, changes) in WAYS.items() for place in range(len(changes))]


@pytest.fixture
def _everything_as_before():
    """Undo what the changes do to this module's own variables, classes and functions."""
    kept = copy.deepcopy([SETTINGS, TABLE, BOX, BOUND, function_with_default.__defaults__, Scaled.held_by_class])
    names, code, scale = dict(vars(Scaled)), reads_constant.__code__, READ.__closure__[1].cell_contents
    token = CURRENT.set(1.0)
    yield
    CURRENT.reset(token)
    SETTINGS.update(kept[0])
    TABLE[:] = kept[1]
    BOX.update(kept[2])
    BOUND.update(kept[3])
    function_with_default.__defaults__ = kept[4]
    Scaled.held_by_class, Scaled.by_class, Scaled.helper = kept[5], names["by_class"], names["helper"]
    reads_constant.__code__ = code
    READ.__closure__[READ.__code__.co_freevars.index("scale")].cell_contents = 1.0
    globals().update(SCALE=1.0)
    assert scale is not None


def model_that_reads(read):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Scaled(read), nn.Linear(4, 4))


def edited(model):
    with th.edit(model, {"2": th.scale(2.0)}):
        return model(X)


@pytest.mark.usefixtures("_everything_as_before")
@pytest.mark.parametrize("opened", ["before", "after"])
@pytest.mark.parametrize(("name", "place"), CASES)
def test_what_a_forward_reads_is_compared(name, place, opened):
    read, changes = WAYS[name]
    model = model_that_reads(read)
    with th.record(model, replay=True) as tape:
        model(X)
    if opened == "after":
        changes[place](model[1])
        if name in ("a buffer", "a parameter"):
            with pytest.raises(th.ReplayError, match="weights have changed"):
                th.replay(model, tape).start()
            return
    with th.replay(model, tape) as session:
        if opened == "before":
            before = edited(model)
            assert session.served.calls["1"] == 1
            changes[place](model[1])
        replayed = edited(model)
    truth = edited(model)
    assert torch.equal(replayed, truth)
    assert "differs from the recorded run" in session.served.computed["1"]
    assert session.served.calls["0"] == (2 if opened == "before" else 1)
    if opened == "before":
        assert not torch.equal(before, truth)


def test_a_fused_optimizer_is_seen():
    model = model_that_reads(lambda m: 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with th.record(model, replay=True) as tape:
        model(X)
    with th.replay(model, tape) as session:
        edited(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert torch.equal(edited(model), edited_plainly(model))
    assert session.served.calls["1"] == 1


def edited_plainly(model):
    """The same with PyTorch's own hook."""
    handle = model[2].register_forward_hook(lambda _m, _a, out: out * 2)
    try:
        return copy.deepcopy(model)(X)
    finally:
        handle.remove()


UNCOMPARABLE = {
    "an iterator": lambda m: float(next(m.counter) * 0 + 1),
    "a generator of random numbers": lambda m: torch.rand(4, generator=m.generator) * 0 + 1,
    "a file": lambda m: m.file.fileno() * 0.0 + 1,
    "NumPy's generator": lambda m: float(m.numpy.random() * 0 + 1),
    "Python's generator": lambda m: m.python.random() * 0 + 1,
}


@pytest.mark.parametrize("name", UNCOMPARABLE)
def test_what_cannot_be_compared_is_computed_and_the_reason_is_given(name, tmp_path):
    model = model_that_reads(UNCOMPARABLE[name])
    with (tmp_path / "file").open("w") as file:
        one = {
            "an iterator": ("counter", itertools.count()),
            "a generator of random numbers": ("generator", torch.Generator()),
        }
        one |= {"a file": ("file", file), "NumPy's generator": ("numpy", np.random.default_rng(0))}
        one |= {"Python's generator": ("python", random.Random(0))}
        setattr(model[1], *one[name])
        with th.record(model, replay=True) as tape:
            model(X)
        with th.replay(model, tape) as session:
            edited(model)
    assert session.served.computed["1"].startswith("it may read a")
    assert "cannot be compared" in session.served.computed["1"]
    assert session.served.calls == {"0": 1, "1.inner": 1, "2": 1}


class Named(NamedTuple):
    scale: float = 1.0


def test_a_forward_that_reads_a_named_field_is_served_until_the_class_changes(monkeypatch):
    model = model_that_reads(lambda _: Named().scale)
    with th.record(model, replay=True) as tape:
        model(X)
    with th.replay(model, tape) as session:
        edited(model)
    assert session.served.calls["1"] == 1
    monkeypatch.setattr(Named, "scale", 3.0)
    with th.replay(model, tape) as session:
        assert torch.equal(edited(model), edited_plainly(model))


WRITTEN = []


def test_a_forward_that_writes_to_a_global_is_computed():
    def writes(_):
        WRITTEN.append(1)
        return 1.0

    model = model_that_reads(writes)
    with th.record(model, replay=True) as tape:
        model(X)
    WRITTEN.clear()
    with th.replay(model, tape, verify=False) as session:
        edited(model)
    assert len(WRITTEN) == 1
    assert "1" in session.served.computed


def test_inputs_that_share_memory_with_numpy_are_compared_with_a_copy():
    model, memory = model_that_reads(lambda m: 1.0), np.ones((2, 4), np.float32)
    x = torch.from_numpy(memory)
    with th.record(model, replay=True) as tape:
        model(x)
    memory.fill(3)
    with pytest.raises(th.ReplayError, match="never called with the inputs"):
        with th.replay(model, tape):
            replayed = model(x)
    assert torch.equal(replayed, model(x))


def test_random_changes_of_random_state_are_never_served_wrong():
    """Models with several such layers; between runs, some of what they read is changed."""
    draw = random.Random(0)
    own = [name for name in WAYS if name not in OF_THIS_FILE]
    runs = served = 0
    for _ in range(60):
        torch.manual_seed(draw.randrange(1000))
        names = [draw.choice(own) for _ in range(3)]
        model = nn.Sequential(nn.Linear(4, 4), *[Scaled(WAYS[name][0]) for name in names], nn.Linear(4, 4))
        with th.record(model, replay=True) as tape:
            model(X)
        with th.replay(model, tape) as session:
            for _ in range(4):
                for place in draw.sample(range(3), draw.randrange(2)):
                    draw.choice(WAYS[names[place]][1])(model[1 + place])
                with th.edit(model, {"4": th.scale(2.0)}):
                    replayed = model(X)
                truth = X
                for layer in model:
                    truth = type(layer).forward(layer, truth)
                truth = truth * 2
                assert torch.equal(replayed, truth), names
                runs += 1
            served += len(session.served)
    assert runs == 240
    assert served > 400


OF_THIS_FILE = {
    "a class attribute", "a dict of the class", "a global", "a global in a method", "a method", "a nested global",
    "a global array", "a closure", "a default", "code", "a bound argument", "a context variable",
}  # fmt: skip
