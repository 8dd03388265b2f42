"""An interrupt at any instant of tenterhook's own code leaves the model as it was.

A trace function raises ``KeyboardInterrupt`` at the n-th event (a call, a line or a return) in tenterhook's files; the
whole of an everyday use is run once for each n. In a process that has compiled nothing: otherwise a session also looks
at every function that Dynamo knows, and there are far more instants, all alike.
"""

import contextlib
import random
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import tenterhook as th
from tenterhook.engine.install import locked
from tenterhook.engine.session import open_here

OWN = str(Path(th.__file__).parent)
PROBED = ("pytorch/support.py", "pytorch/probes")
SHORT = 40
"""instants of each use in the usual run; the slow one takes all"""


@pytest.fixture(autouse=True)
def compile_was_used(nothing_compiled):
    """Replaces the fixture that runs each test as in both."""


@pytest.fixture(autouse=True)
def _lock_is_released():
    """Release the lock that installs forwards.

    A trace function can raise between the end of a ``with`` block and its ``__exit__``. A signal cannot: the
    interpreter looks for one after a call, and that call is the ``__exit__`` itself.
    """
    yield
    while locked._is_owned():
        locked.release()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.one(self.norm(x))
        hidden = torch.relu(hidden)
        return x + self.two(hidden)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.encoder = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.pruned = prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.old = weight_norm(nn.Linear(4, 4))

    def forward(self, x):
        x = self.encoder(self.blocks(x))
        return self.old(self.pruned(self.normed(self.rnn(x)[0])))


def record(model, x):
    with torch.no_grad(), th.record(model):
        model(x)


def some_points(model, x):
    with th.record(model, "blocks.*:hidden[*]", "encoder:in", "rnn", "blocks.0.one.weight"):
        model(x)


def record_last(model, x):
    with torch.no_grad(), th.record(model, keep="last"):
        model(x)


def variables(model, x):
    with torch.no_grad(), th.record(model, "blocks.*:hidden[0]"):
        model(x)


def gradients(model, x):
    with th.record(model, grad=True):
        model(x).sum().backward()


def edit(model, x):
    edits = {
        "blocks.0.one": lambda value: value * 2,
        "blocks.1:hidden[1]": th.zero(),
        "encoder.linear1:in": th.scale(2),
    }
    with th.edit(model, edits, grad={"rnn:in": th.scale(2)}):
        model(x).sum().backward()


def edit_outputs(model, x):
    with th.edit(model, {"blocks.*": th.scale(2), "rnn": lambda value: (value[0] * 2, value[1])}):
        model(x).sum().backward()


def parameters(model, x):
    names = "blocks.0.one.weight", "rnn.weight_ih_l0", "normed.parametrizations.weight.original1", "pruned.weight_orig"
    with th.edit(model, {name: th.scale(2) for name in (*names, "old.weight_g")}):
        model(x)


def stop(model, x):
    with th.record(model, "blocks.1", stop=True):
        model(x)


def watch(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with th.watch(model, optimizer=optimizer):
        model(x).sum().backward()
        optimizer.step()


def watch_some_steps(model, x):
    with th.watch(model, every=2, steps="call"):
        for _ in range(3):
            model(x).sum().backward()


def nested(model, x):
    with th.record(model, "blocks.*"), th.edit(model, {"blocks.0": th.scale(2)}), th.record(model):
        model(x)


def same_block_twice(model, x):
    session = th.edit(model, {"blocks.0": th.scale(2)})
    with session, session:
        model(x)


def record_for_replay(model, x):
    with torch.no_grad(), th.record(model, "blocks.*", replay=True):
        model(x)


def in_a_stack(model, x):
    with contextlib.ExitStack() as stack:
        stack.enter_context(th.record(model, "blocks.*"))
        stack.enter_context(th.edit(model, {"blocks.0": th.scale(2), "rnn:in": th.scale(2)}))
        model(x)


USES = [
    record, record_last, variables, some_points, gradients, edit, edit_outputs, parameters, stop, watch,
    watch_some_steps, nested, same_block_twice, record_for_replay,
]  # fmt: skip


class Interrupter:
    """Raises at the n-th event in tenterhook's own files."""

    def __init__(self, at=None):
        self.count, self.at, self.where = 0, at, None

    def __call__(self, frame, event, arg):
        name = frame.f_code.co_filename
        if not name.startswith(OWN) or name.endswith(PROBED[0]):
            return None
        return self.event(frame, event, arg)

    def event(self, frame, event, arg):
        if event == "exception":
            return self.event
        self.count += 1
        if self.count == self.at:
            self.where = (
                f"{Path(frame.f_code.co_filename).relative_to(OWN)}:{frame.f_lineno} {event} {frame.f_code.co_name}"
            )
            raise KeyboardInterrupt
        return self.event

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


def state(model):
    """Everything that a session could have left, by identity; tensors also by value."""
    found = {"open": len(open_here()), "fast path": torch.backends.mha.get_fastpath_enabled()}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if isinstance(value, dict | list | set):
                found[path, name] = (
                    [id(each) for each in value],
                    [id(each) for each in getattr(value, "values", list)()],
                )
            else:
                found[path, name] = id(value)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found["values"] = {name: tensor.detach().flatten().tolist() for name, tensor in tensors.items()}
    found["hooks"] = {name: len(tensor._backward_hooks or ()) for name, tensor in tensors.items()}
    return found


def derived(model):
    return [model.pruned.weight.detach().tolist(), model.old.weight.detach().tolist()]


class Fixture:
    def __init__(self):
        torch.manual_seed(0)
        self.model, self.x = Net().eval(), torch.randn(2, 3, 4)
        self.expected = self.model(self.x)
        self.derived = derived(self.model)
        self.settle()

    def settle(self):
        self.model.zero_grad(set_to_none=True)
        self.model.pruned.weight = self.model.pruned.weight.detach()
        self.model.old.weight = self.model.old.weight.detach()
        self.state = state(self.model)

    def wrong(self):
        """What an interrupted use has left."""
        now = state(self.model)
        # The hooks of these two layers set a new weight in each call.
        computed = {("pruned", "weight"), ("old", "weight")}
        left = [key for key in now.keys() | self.state.keys() if now.get(key) != self.state.get(key)]
        left = [key for key in left if key not in computed]
        if derived(self.model) != self.derived:
            left.append("derived weights")
        if not torch.equal(self.model(self.x), self.expected):
            left.append("output")
        return left


def interrupted(use, fixture, at):
    """Run a use, interrupted at an instant; return where that was, and what it has left."""
    with contextlib.suppress(KeyboardInterrupt, th.TenterhookError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Interrupter(at) as tracer:
            use(fixture.model, fixture.x)
    return tracer, fixture.wrong()


def instants(use, fixture):
    for _ in range(2):  # The first one also fills caches.
        tracer, left = interrupted(use, fixture, None)
    assert not left
    return tracer.count


@pytest.fixture
def no_unraisable(monkeypatch):
    """An interrupt inside ``__del__`` is reported by the interpreter; there is nobody to raise it to."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def check(use, chosen, but=()):
    fixture = Fixture()
    count = instants(use, fixture)
    dirty = []
    for at in chosen(count):
        tracer, left = interrupted(use, fixture, at)
        if str(tracer.where).endswith(but or ("no function",)):
            fixture = Fixture()
            interrupted(use, fixture, None)
        elif left:
            dirty.append((at, tracer.where, left[:4]))
            fixture = Fixture()
            interrupted(use, fixture, None)
        else:
            fixture.settle()
    assert not dirty, dirty[:20]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.usefixtures("no_unraisable")
def test_an_interrupt_leaves_the_model_as_it_was(use):
    draw = random.Random(use.__name__)
    check(use, lambda count: sorted(draw.sample(range(1, count + 1), min(SHORT, count))))


@pytest.mark.usefixtures("no_unraisable")
def test_an_interrupt_while_an_exit_stack_closes_sessions_leaves_the_model_as_it_was():
    """A stack enters and leaves by calls of its own: only the instants at which these begin and end are not covered."""
    draw = random.Random(0)

    def chosen(count):
        return sorted(draw.sample(range(count // 2, count + 1), min(4 * SHORT, count // 2)))

    check(in_a_stack, chosen, but=("_leave", "__enter__"))


@pytest.mark.slow
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.usefixtures("no_unraisable")
def test_an_interrupt_at_any_instant_leaves_the_model_as_it_was(use):
    check(use, lambda count: range(1, count + 1))
