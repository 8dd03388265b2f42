import torch
from torch import nn

import tenterhook as th
from tenterhook.pytorch.autograd import own_alias


def test_an_alias_has_the_strides_of_its_tensor_where_a_dimension_has_size_one():
    tensor = torch.randn(1, 8, 4, 4).to(memory_format=torch.channels_last)
    assert own_alias(tensor).stride() == tensor.stride()


def test_recording_gradients_leaves_the_strides_of_what_a_module_returns():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Identity()).to(memory_format=torch.channels_last)
    image = torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last)
    plain = model(image)
    with th.record(model, "**", "**:in", grad=True):
        recorded = model(image)
    assert recorded.stride() == plain.stride()
