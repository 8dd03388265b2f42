"""The models that are measured: built from a configuration and a seed, never downloaded."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 512
TOKENS = 16
BLOCKS = tuple(f"transformer.h.{i}" for i in range(12))


def gpt2() -> GPT2LMHeadModel:
    """GPT-2 in shape, small enough that the cost of a hook shows: 12 blocks, width 128, 164 modules."""
    config = GPT2Config(
        n_layer=len(BLOCKS),
        n_embd=128,
        n_head=4,
        n_positions=64,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval()


def tokens() -> torch.Tensor:
    """The one input, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (1, TOKENS), generator=generator)


def mlp() -> nn.Sequential:
    """A few small layers, for work that is repeated a thousand times."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).eval()


class Basic(nn.Module):
    """The block of a small residual network, working in place as they do."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(narrow, wide, 3, stride, padding=1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(wide), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide)
        same = stride == 1 and narrow == wide
        shorter = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
        self.downsample = None if same else shorter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block, with its shortcut."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Eighteen layers in four stages, as in the paper."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        widths = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        stages = [nn.Sequential(Basic(narrow, wide, stride), Basic(wide, wide, 1)) for narrow, wide, stride in widths]
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of a thousand classes."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet() -> ResNet:
    """A residual network of 18 layers, from a seed."""
    torch.manual_seed(0)
    return ResNet().eval()
