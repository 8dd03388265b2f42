"""Variables inside the attention blocks of many real architectures, against what the models themselves report."""

import os

import pytest
import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers import CONFIG_MAPPING, AutoModel

import tenterhook as th
from tenterhook.testing import untouched

# The models of these types report their attention weights, and compute them in a function that they share.
TYPES = (
    "afmoe", "apertus", "arcee", "bert", "camembert", "cohere", "cohere2", "cwm", "data2vec-text", "electra", "ernie",
    "ernie4_5", "esm", "eurobert", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neox",
    "granite", "helium", "hunyuan_v1_dense", "jais2", "llama", "ministral", "ministral3", "mistral", "mixtral",
    "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "roberta", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "xlm-roberta",
)  # fmt: skip

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "max_position_embeddings": 64, "ffn_dim": 64, "word_embed_proj_dim": 32, "moe_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_size": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def build(model_type):
    config = CONFIG_MAPPING[model_type]()
    for key, value in SMALL.items():
        if hasattr(config, key):
            setattr(config, key, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    return AutoModel.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.filterwarnings("ignore")  # The libraries' own remarks on tiny configurations.
def test_the_attention_weights_inside_are_those_that_the_model_reports(model_type):
    model = build(model_type)
    ids = torch.randint(3, 99, (1, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reported = model(ids, output_attentions=True).attentions
        inner = "**:eager_attention_forward()"
        with untouched(model), th.record(model, f"{inner}:dropout()", f"{inner}:value", f"{inner}:matmul()[1]") as tape:
            model(ids)
    weights, values, products = (
        [tape[address] for address in tape if address.endswith(end)] for end in ("dropout()", ":value", "matmul()[1]")
    )
    assert len(weights) == len(reported) == 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, reported, strict=True))
    # The product, by hand, of what was recorded at two other places; grouped heads share their values.
    for weight, value, product in zip(weights, values, products, strict=True):
        shared = value.repeat_interleave(weight.shape[1] // value.shape[1], dim=1)
        assert torch.equal(torch.matmul(weight, shared), product)
