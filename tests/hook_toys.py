"""Toy modules for the tests of PyTorch's hook functions."""

import torch
from torch import nn

X = torch.arange(12.0).view(4, 3) / 7 - 0.8


def then(value, use):
    return use(value)


def x_leaf():
    return X.clone().requires_grad_()


class Run(nn.Module):
    """A module with the forward that a test passes."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *args, **kwargs):
        return self.run(*args, **kwargs)
