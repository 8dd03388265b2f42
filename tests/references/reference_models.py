"""The models on which tenterhook and the references are compared."""

import copy

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """What every library can do: no module twice, nothing in place, no functions."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1, self.relu1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()
        self.conv2, self.relu2, self.pool = nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        self.flatten, self.fc1, self.relu3, self.fc2 = nn.Flatten(), nn.Linear(8 * 25, 16), nn.ReLU(), nn.Linear(16, 5)

    def forward(self, x):
        x = self.relu1(self.norm1(self.conv1(x)))
        x = self.pool(self.relu2(self.conv2(x)))
        return self.fc2(self.relu3(self.fc1(self.flatten(x))))


class Reused(nn.Module):
    """The same in the way that most people write it: one ReLU for all, in place, and a function."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.conv3 = nn.Conv2d(6, 6, 3, padding=1)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(6 * 100, 5)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        return self.fc(F.relu(self.conv3(x)).flatten(1))


class Unrolled(nn.Module):
    """``Reused`` unrolled by hand: a ReLU of its own for each place, none in place, no function."""

    def __init__(self, model):
        super().__init__()
        self.conv1, self.conv2, self.conv3, self.fc = model.conv1, model.conv2, model.conv3, model.fc
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x):
        x = self.relu2(self.conv2(self.relu1(self.conv1(x))))
        return self.fc(self.relu3(self.conv3(x)).flatten(1))


def made(kind, seed=0):
    torch.manual_seed(seed)
    model = kind().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
    return model


def images(count=2, seed=1):
    return torch.rand(count, 3, 10, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.3


def gpt2_and_bridge():
    """Return a small GPT-2, and TransformerLens's bridge of a copy of it: the bridge changes what it is given."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    words = WordLevel({str(index): index for index in range(50)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="0", pad_token="0", unk_token="0")
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=copy.deepcopy(model), tokenizer=tokenizer)
    return model, bridge.eval()
