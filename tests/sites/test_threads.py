"""A session belongs to the thread that opened it, and to no later thread that the system gives the same number."""

import threading

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.sites.threads import current

X = torch.ones(1, 3)
TRIES = 20


def in_thread(function):
    """Run a function in a thread of its own, which then ends; return its result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_no_two_threads_have_the_same_token():
    tokens = [in_thread(lambda: current.token) for _ in range(TRIES)]
    assert len({*tokens, current.token}) == TRIES + 1


@pytest.mark.parametrize(
    "opened",
    [
        lambda model: th.edit(model, {"0": th.zero()}),
        lambda model: th.edit(model, {"0.weight": th.zero()}),
        lambda model: th.edit(model, {"0:in": th.zero()}),
    ],
    ids=["output", "parameter", "argument"],
)
def test_the_session_of_a_thread_that_has_ended_does_not_act_in_a_new_one(opened):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    truth = model(X)
    for _ in range(TRIES):
        session = in_thread(opened(model).start)
        assert torch.equal(in_thread(lambda: model(X)), truth)
        with pytest.raises(th.NeverReached):
            session.close()


def test_a_recording_of_a_thread_that_has_ended_sees_nothing_of_a_new_one():
    model = nn.Sequential(nn.Linear(3, 3))
    for _ in range(TRIES):
        session = in_thread(th.record(model, "*").start)
        in_thread(lambda: model(X))
        with pytest.raises(th.NeverReached, match="not by the thread"):
            session.close()
        assert len(session.tape) == 0
