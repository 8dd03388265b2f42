"""Memory that is changed past PyTorch's version counter: a tape has copies of what lies there."""

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th

WAYS = {
    "from_numpy": torch.from_numpy,
    "as_tensor": torch.as_tensor,
    "a part": lambda array: torch.from_numpy(array)[:, :2],
    "frombuffer": lambda array: torch.frombuffer(array, dtype=torch.float32).view(2, 3),
    "dlpack": torch.from_dlpack,
}


class Gives(nn.Module):
    """Returns what it was made to return."""

    def __init__(self, give):
        super().__init__()
        self.give, self.weight = give, nn.Parameter(torch.ones(2, 3))
        self.register_buffer("kept", torch.ones(2, 3))

    def forward(self, x):
        part = self.give(self, x)
        return part


@pytest.mark.parametrize("grad", [False, True], ids=["", "no grad"])
@pytest.mark.parametrize("point", [":in", ":return", ":part", ":x"])
@pytest.mark.parametrize("way", WAYS)
def test_memory_of_numpy_is_copied(way, point, grad):
    array = np.zeros((2, 3), np.float32)
    model = Gives(lambda _module, x: x)
    with torch.set_grad_enabled(grad), th.record(model, point) as tape:
        model(WAYS[way](array))
    array[:] = 7
    assert tape[point].eq(0).all()


@pytest.mark.parametrize("grad", [False, True], ids=["", "no grad"])
@pytest.mark.parametrize("layer", [nn.Flatten(), nn.Identity(), nn.Dropout(), nn.Unflatten(1, (1, 3))], ids=repr)
def test_memory_of_numpy_that_a_layer_passes_on_is_copied(layer, grad):
    array = np.zeros((2, 3), np.float32)
    model = nn.Sequential(layer, nn.Tanh()).eval()
    with torch.set_grad_enabled(grad), th.record(model, "*") as tape:
        model(torch.from_numpy(array)[None].squeeze(0))  # A view whose base nothing in Python refers to.
    array[:] = 7
    assert tape["0"].eq(0).all()


@pytest.mark.parametrize("keep", ["all", "last"])
@pytest.mark.parametrize("give", [lambda _, x: torch.from_numpy(x.numpy()), lambda _, x: x.detach()])
def test_a_new_tensor_on_memory_of_numpy_is_an_error(give, keep):
    array = np.zeros((2, 3), np.float32)
    model = Gives(give)
    with torch.no_grad(), th.record(model, keep=keep) as tape:
        model(torch.from_numpy(array))
    array[:] = 7
    with pytest.raises(th.ValueChanged, match="its module created it from NumPy's memory"):
        tape[":return"]


def test_an_array_that_is_refilled_for_each_call_leaves_the_calls_before():
    array = np.zeros((2, 3), np.float32)
    model = nn.Sequential(nn.Identity())
    with th.record(model, "0", "0:in") as tape:
        for number in range(4):
            array[:] = number
            model(torch.from_numpy(array))
    for number in range(4):
        assert tape.calls("0")[number].eq(number).all()
        assert tape.calls("0:in")[number].eq(number).all()


@pytest.mark.parametrize(
    "give",
    [
        lambda module, _: module.weight,
        lambda module, _: module.weight[0],
        lambda module, _: module.weight.view(6)[1:4],
        lambda module, _: module.weight.T,
    ],
    ids=["itself", "a row", "a view of a view", "transposed"],
)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_a_fused_optimizer_does_not_reach_a_recorded_parameter(give, grad):
    model = Gives(give)
    with torch.set_grad_enabled(grad), th.record(model, ":return") as tape:
        model(torch.ones(1))
    before = tape[":return"].clone()
    model.weight.grad = torch.ones(2, 3)
    torch.optim.AdamW(model.parameters(), lr=0.5, fused=True).step()
    assert torch.equal(tape[":return"], before)
    assert not torch.equal(model(torch.ones(1)).detach(), before)
