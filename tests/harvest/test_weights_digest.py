import torch
from torch import nn

from tenterhook.harvest.weights_digest import weights_of


def test_the_digest_of_weights_follows_every_change():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    first = weights_of(model)
    assert weights_of(model) == first
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    second = weights_of(model)
    assert second != first
    with torch.no_grad():
        model[0].weight[0, 0] -= 1
    model[0].weight = nn.Parameter(model[0].weight.detach().clone() * 2)
    third = weights_of(model)
    assert third not in {first, second}
    model.train()(torch.randn(5, 3))  # the running mean
    assert weights_of(model) != third


def test_equal_weights_in_another_model_have_the_same_digest():
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    assert weights_of(one) != weights_of(other)
    other.load_state_dict(one.state_dict())
    assert weights_of(one) == weights_of(other)
    assert weights_of(one) != weights_of(one.half())
