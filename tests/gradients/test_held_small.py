"""With ``keep="last"``, a small gradient stays until the next one comes; a large one goes when the module is called."""

import weakref

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.record.recorded_gradients import SMALL


@pytest.mark.parametrize("width", [8, SMALL])
def test_a_gradient_that_nobody_can_ask_for_is_held_only_if_it_is_small(width):
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh())
    found = []

    def hook(_module, args):
        args[0].register_hook(lambda gradient: found.append(weakref.ref(gradient)))

    with model[1].register_forward_pre_hook(hook), th.record(model, "0", grad=True, values=False, keep="last") as tape:
        model(torch.randn(2, 4)).pow(2).sum().backward()
        assert found[0]() is not None
        loss = model(torch.randn(2, 4)).pow(2).sum()
        with pytest.raises(th.GradientError):
            tape.grad["0"]
        assert (found[0]() is not None) == (width == 8)
        loss.backward()
        assert found[0]() is None
        assert tape.grad["0"] is found[1]()
    assert found[1]() is not None
    del tape
    assert found[1]() is None
