"""The measured models: built from a configuration and a seed, never downloaded."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 512
TOKENS = 16
BLOCKS = tuple(f"transformer.h.{i}" for i in range(12))


def gpt2() -> GPT2LMHeadModel:
    """Return a GPT-2 small enough that the cost of a hook is visible: 12 blocks, width 128, 164 modules."""
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
    """Return the input, which is the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (1, TOKENS), generator=generator)


def mlp() -> nn.Sequential:
    """Return a few small layers, for work that is repeated a thousand times."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
