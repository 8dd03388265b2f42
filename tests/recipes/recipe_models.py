"""Models for the tests of attribution, and the same unrolled by hand, which is the truth."""

import torch
from torch import nn
from torch.nn import functional as F


class Reused(nn.Module):
    """One ReLU for all, in place, and a function: what attribution gets wrong if it looks at modules alone."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.conv3, self.relu, self.fc = nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Linear(6 * 64, 5)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        return self.fc(F.relu(self.conv3(x)).flatten(1))


def unrolled(model, x, relu=torch.relu):
    """The values of ``Reused``, by name, in operations that change nothing in place."""
    found = {"conv1": model.conv1(x)}
    found["relu#0"] = relu(found["conv1"])
    found["conv2"] = model.conv2(found["relu#0"])
    found["relu#1"] = relu(found["conv2"])
    found["conv3"] = model.conv3(found["relu#1"])
    found["out"] = model.fc(relu(found["conv3"]).flatten(1))
    return found


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, ids, scale=None):
        x = torch.tanh(self.mix(self.embed(ids)))
        x = x if scale is None else x * scale[:, None, None]
        return self.head(x.mean(1))


def reused():
    torch.manual_seed(0)
    return Reused().double().eval()


def images(count=2):
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.3
