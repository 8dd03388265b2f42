"""A residual network of eighteen layers, as in "Deep Residual Learning for Image Recognition" (He et al., 2015)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

__all__ = ["ResNet18"]


class Block(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the convolutions' output and the input."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """Four stages of two blocks each."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [64, 64, 128, 256, 512]
        for number, (inside, outside) in enumerate(itertools.pairwise(widths), 1):
            stride = 1 if number == 1 else 2
            stage = nn.Sequential(Block(inside, outside, stride), Block(outside, outside, 1))
            self.add_module(f"layer{number}", stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))
