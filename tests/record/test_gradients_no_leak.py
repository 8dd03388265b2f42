"""Nothing stays behind: no tensor, no graph, without the garbage collector."""

import gc

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook import hooks
from tenterhook.testing import Mixed, Residual, live_tensors, no_leak, untouched

X = torch.arange(12.0).view(2, 2, 3) / 7 - 0.8


def model_with_everything():
    return nn.Sequential(
        nn.Linear(3, 3),
        nn.Identity(),
        Residual(3),
        nn.Linear(3, 3),
        nn.Flatten(),
        nn.ReLU(inplace=True),
        nn.Linear(6, 1),
    )


def warm_up(run):
    run()
    gc.collect()


def test_a_thousand_steps_each_with_its_session_leave_nothing():
    model = model_with_everything()

    def step():
        with th.record(model, "**", "1:in", "2:in", "4:in", "0.weight", grad=True) as tape:
            model(X).sum().backward()
        assert tape.grad["0"] is not None
        model.zero_grad()

    warm_up(step)
    with no_leak():
        for _ in range(1000):
            step()


def test_a_thousand_steps_in_one_session_keep_the_last_alone():
    model = model_with_everything()

    def run(steps):
        with th.record(model, "**", "2:in", grad=True, keep="last") as tape:
            for _ in range(steps):
                model(X).sum().backward()
                model.zero_grad()
            assert len(tape.grad.calls("0")) == 1

    warm_up(lambda: run(1))
    with no_leak():
        run(1000)


def edits(model, x):
    with th.edit(model, grad={"*": lambda g: g * 2, "2:in": lambda g: g, "0.weight": lambda g: g}):
        model(x).sum().backward()


def classic_hooks(model, x):
    handles = [hooks.register_backward_hook(part, lambda *_: None) for part in model]
    handles += [hooks.register_backward_pre_hook(part, lambda *_: None) for part in model]
    model(x).sum().backward()
    for handle in handles:
        handle.remove()


def recorded(model, x, grad=True, then=lambda tape, loss: None):
    with th.record(model, "**", "2:in", "4:in", grad=grad) as tape:
        then(tape, model(x).sum())


def fails(tape, loss):
    loss.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()


WAYS = {
    "edits": edits,
    "classic hooks": classic_hooks,
    "never backward": recorded,
    "total": lambda model, x: recorded(model, x, "total", lambda tape, loss: loss.backward()),
    "tape.backward": lambda model, x: recorded(model, x, then=lambda tape, loss: tape.backward(loss)),
    "create_graph": lambda model, x: recorded(
        model, x, then=lambda tape, loss: (tape.backward(loss, create_graph=True)["0"].sum() + loss).backward()
    ),
    "an error in backward": lambda model, x: recorded(model, x, then=fails),
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_done_nothing_is_left(way):
    model = model_with_everything()

    def once():
        WAYS[way](model, X.clone().requires_grad_())
        model.zero_grad()

    warm_up(once)
    with untouched(model), no_leak():
        for _ in range(3):
            once()


def test_an_error_in_forward_leaves_nothing_of_a_gradient_session():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity())

    def fail(*_):
        raise ZeroDivisionError

    model[1].forward = fail

    def once():
        # Not by pytest.raises, which keeps the traceback with all its frames.
        try:
            with th.record(model, "1:in", "0", grad=True), th.edit(model, grad={"1:in": lambda g: g}):
                model(X.clone().requires_grad_())
        except ZeroDivisionError:
            return
        pytest.fail("no error")

    warm_up(once)
    with untouched(model), no_leak():
        once()


def test_structures_leave_nothing():
    model = Mixed(3)

    def once():
        with th.record(model, "**", "part:scale", grad=True) as tape:
            model(X).sum().backward()
        assert tape.grad["part"]["rest"][1] is None
        model.zero_grad()

    warm_up(once)
    with no_leak():
        once()


def test_a_graph_that_the_model_keeps_keeps_nothing_of_a_tape_that_is_gone():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.flat = nn.Linear(4, 4), nn.Flatten(0)

        def forward(self, x):
            y = self.flat(self.linear(x))
            self.state = y * 2
            y += 0  # So that the base of the view is watched too.
            return y

    model, x = Keeps(), torch.ones(3, 4)
    model(x).sum().backward()
    before = len(live_tensors())
    with th.record(model, "flat", "flat:in", grad=True) as tape:
        model(x).sum().backward()
    tape.grad["flat"]
    del tape
    assert len(live_tensors()) == before
