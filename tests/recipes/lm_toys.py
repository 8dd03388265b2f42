"""Small language models for the recipes' tests."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

SIZES = {
    "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 50,
    "max_position_embeddings": 64, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def gpt2(layers=3):
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=16, n_head=2, vocab_size=50, n_positions=64, bos_token_id=0, eos_token_id=None,
        pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, initializer_range=0.2)).eval()


def gemma():
    torch.manual_seed(0)
    config = GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=8, initializer_range=0.2)
    return GemmaForCausalLM(config).eval()


def gemma2():
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=8, initializer_range=0.2)
    return Gemma2ForCausalLM(config).eval()


def neox():
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, initializer_range=0.2)).eval()


def ids(seed=0, count=2, length=6):
    return torch.randint(1, 50, (count, length), generator=torch.Generator().manual_seed(seed))
