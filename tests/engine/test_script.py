"""torch.jit.script inside a session: refused before it does anything, and possible again afterwards."""

import copy
import pickle

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import untouched

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Prepared(Net):
    def __prepare_scriptable__(self):
        self.prepared = True
        return self


SESSIONS = {
    "record": lambda model: th.record(model, "a"),
    "edit": lambda model: th.edit(model, {"a": th.zero()}),
    "whole": lambda model: th.edit(model, {":return": th.zero()}),
    "inside": lambda model: th.edit(model, {":tanh()": th.zero()}),
    "parameter": lambda model: th.edit(model, {"b.bias": th.zero()}),
}


@pytest.mark.parametrize("session", SESSIONS)
def test_a_model_in_a_session_is_not_scripted_and_can_be_afterwards(session):
    model = Net()
    wanted = model(X)
    with untouched(model), SESSIONS[session](model):
        with pytest.raises(th.SessionError, match=r"torch\.jit\.script.*Close the session"):
            torch.jit.script(model)
        model(X)
    assert torch.equal(torch.jit.script(model)(X), wanted)


def test_copies_and_pickles_that_were_made_in_a_session_can_be_scripted():
    model = Net()
    with th.edit(model, {"a": th.zero()}):
        model(X)
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(torch.jit.script(copied)(X), copied(X))
    assert torch.equal(torch.jit.script(loaded)(X), model(X))
    assert torch.equal(torch.jit.script(copied)(X), model(X))


def test_a_pickle_of_a_session_can_be_read_without_this_library():
    model = Net()
    with th.record(model, "a"):
        model(X)
        assert b"tenterhook" not in pickle.dumps(model)


def test_a_class_that_prepares_itself_still_does():
    model = Prepared()
    with untouched(model), th.record(model, "a", ":return"):
        with pytest.raises(th.SessionError):
            torch.jit.script(model)
        model(X)
        copied = copy.deepcopy(model)
    assert torch.equal(torch.jit.script(copied)(X), model(X))
    assert copied.prepared


def test_a_module_beside_the_session_is_scripted():
    model = Net()
    with th.record(model, "a"):
        assert torch.equal(torch.jit.script(model.b)(X), model.b(X))
        model(X)
