"""Probes, on features of which it is known what can be read from them."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import tenterhook as th

R = th.recipes


class Narrowing(nn.Module):
    """The first layer hands everything on, the second forgets all but the sign of one number, the third all."""

    def __init__(self):
        super().__init__()
        self.all, self.sign, self.none, self.ran = nn.Identity(), nn.Identity(), nn.Identity(), 0
        self.after = nn.Identity()

    def forward(self, x):
        x = self.all(x)
        sign = self.sign(x[:, :1].sign())
        x = self.none(sign * 0)
        self.ran += 1
        return self.after(x)


def test_probes_tell_what_each_layer_still_knows():
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    model = Narrowing()
    found = R.probe(model, x, labels, points=["all", "sign", "none"], batch=64)
    read = found.accuracy.mean(1).tolist()
    assert read[0] > 0.9
    assert 0.35 < read[1] < 0.65  # One of two bits.
    assert read[2] == pytest.approx(found.chance, abs=0.03)
    assert found.best == "all"
    assert found.widths == (6, 1, 1)
    assert model.ran == 1  # The first batch; then nothing runs after the last point.
    assert found.classifiers["all"].score(x.numpy(), labels.numpy()) > 0.95
    assert "all " in repr(found)
    assert len(found.show().axes) == 1


def test_what_a_probe_has_seen_does_not_count():
    torch.manual_seed(0)
    x, labels = torch.randn(60, 200), torch.randint(0, 2, (60,))
    found = R.probe(nn.Sequential(nn.Identity()), x, labels, points="0")
    assert found.classifiers["0"].score(x.numpy(), labels.numpy()) == 1.0
    assert found.accuracy.mean() < 0.75


def test_maps_and_tokens_become_vectors():
    digits = load_digits()
    images = torch.tensor(digits.images[:200], dtype=torch.float32).unsqueeze(1) / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(2))
    labels = torch.tensor(digits.target[:200])
    widths = {
        pool: R.probe(model, images, labels, points=["1", "2"], pool=pool, folds=3).widths
        for pool in ("max", "flatten")
    }
    assert widths == {"max": (4, 36), "flatten": (144, 144)}


def test_bad_input_is_an_error():
    x = torch.rand(10, 3)
    with pytest.raises(th.RecipeError, match="one class for each of the 10"):
        R.probe(nn.Linear(3, 2), x, torch.zeros(9).long(), points=":return")
    with pytest.raises(th.RecipeError, match="5 folds need two classes"):
        R.probe(nn.Linear(3, 2), x, torch.tensor([0] * 8 + [1] * 2), points=":return")
    with pytest.raises(th.RecipeError, match="pool="):
        R.probe(nn.Linear(3, 2), x, torch.tensor([0, 1] * 5), points=":return", pool="sum")
