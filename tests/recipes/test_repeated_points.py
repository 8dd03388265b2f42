"""What every recipe does with a point that is passed several times: it asks which call is meant, or takes them all."""

import pytest
import torch
from torch import nn

import tenterhook as th

R = th.recipes


class Reused(nn.Module):
    """One activation for two places; ``stem`` and ``head`` are called once."""

    def __init__(self):
        super().__init__()
        self.stem, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu, self.head = nn.ReLU(), nn.Linear(4 * 64, 3)

    def forward(self, x):
        return self.head(self.relu(self.middle(self.relu(self.stem(x)))).flatten(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Reused().eval()


X = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def total(output):
    return output.sum()


ASKS = {
    "gradcam": lambda model, point: R.gradcam(model, X, point=point, target=1),
    "gradcam_plus_plus": lambda model, point: R.gradcam_plus_plus(model, X, point=point, target=1),
    "layercam": lambda model, point: R.layercam(model, X, point=point, target=1),
    "scorecam": lambda model, point: R.scorecam(model, X[:1], point=point, target=1),
    "guided_gradcam": lambda model, point: R.guided_gradcam(model, X, point=point, target=1),
    "layer_integrated_gradients": lambda model, point: R.layer_integrated_gradients(
        model, X, point=point, target=1, steps=3
    ),
    "conductance": lambda model, point: R.conductance(model, X, point=point, target=1, steps=3),
    "probe": lambda model, point: R.probe(model, X.repeat(5, 1, 1, 1), torch.arange(40) % 2, points=[point]),
    "feature_attack": lambda model, point: R.feature_attack(model, X, point=point, steps=2),
    "steering": lambda model, point: R.steering(model, X[:4], X[4:], point=point),
    "ablate": lambda model, point: R.ablate(model, X, points=point, metric=total, how="mean"),
    "patching.activation": lambda model, point: R.patching.activation(model, X[:1], X[1:2], points=point, metric=total),
    "patching.attribution": lambda model, point: R.patching.attribution(
        model, X[:1], X[1:2], points=point, metric=total
    ),
    "patching.path": lambda model, point: R.patching.path(
        model, X[:1], X[1:2], senders="stem", receivers=point, freeze=["middle"], metric=total
    ),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_point_that_is_passed_several_times_has_to_be_distinguished(model, name):
    with pytest.raises(th.AmbiguousCall, match="relu#0"):
        ASKS[name](model, "relu")
    assert ASKS[name](model, "relu#1") is not None


def test_what_takes_all_calls_takes_them_all(model):
    with th.edit(model, {"relu#0": th.zero(at=th.at[:, 2]), "relu#1": th.zero(at=th.at[:, 2])}), torch.no_grad():
        without = model(X)[:, 1]
    found = R.channel_ablation(model, X, point="relu", target=1)
    with torch.no_grad():
        torch.testing.assert_close(found.attribution[:, 2], model(X)[:, 1] - without)
    assert "reached 2 times; the channel is removed each time" in found.how[0]
    with th.edit(model, {"relu#0": th.zero(), "relu#1": th.zero()}), torch.no_grad():
        nothing = total(model(X))
    torch.testing.assert_close(R.ablate(model, X, points="relu", metric=total).values.flatten()[0], nothing)
