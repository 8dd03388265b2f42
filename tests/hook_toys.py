"""What the tests of the classic hooks share."""

import torch
from torch import nn

X = torch.arange(12.0).view(4, 3) / 7 - 0.8


def then(value, use):
    return use(value)


def x_leaf():
    return X.clone().requires_grad_()


class Run(nn.Module):
    """A module whose forward is whatever a test says."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *args, **kwargs):
        return self.run(*args, **kwargs)
