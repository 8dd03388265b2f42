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


def tokens():
    return torch.randint(3, 99, (1, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.filterwarnings("ignore")  # The libraries' own remarks on tiny configurations.
def test_the_attention_weights_inside_are_those_that_the_model_reports(model_type):
    model = build(model_type)
    ids = tokens()
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


def feed_forward(model):
    """The first layer's modules that transform each position by itself, with the names of what they call in turn."""
    for path, module in model.named_modules():
        named = path.rpartition(".")[2] in {"mlp", "intermediate"} or hasattr(module, "fc1")
        if named and ".0." in f".{path}." and dict(module.named_children()):
            yield path, module


def hooked(module, seen):
    """PyTorch's own hooks, as another way to the same values."""
    for name, child in module.named_children():
        yield child.register_forward_hook(lambda _m, args, out, name=name: seen.update({name: (args, out)}))


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_what_a_feed_forward_block_calls_and_multiplies_is_what_hooks_see(model_type):
    model = build(model_type)
    (path, block), *_ = feed_forward(model)
    seen = {}
    handles = list(hooked(block, seen))
    with torch.no_grad():
        model(tokens())
    for handle in handles:
        handle.remove()
    there = [str(point) for point in th.points(model, f"{path}:*")]
    calls = {address: name for name in seen for address in there if address == f"{path}:{name}()"}
    product = [address for address in there if address.endswith(":mul()") and "down_proj" in seen]
    with torch.no_grad(), untouched(model), th.record(model, *calls, *product) as tape:
        model(tokens())
    for address, name in calls.items():
        theirs = seen[name][1]
        pairs = zip(tape[address], theirs, strict=True) if isinstance(theirs, tuple) else [(tape[address], theirs)]
        assert all(torch.equal(mine, other) for mine, other in pairs)
    assert calls
    assert product or "gate_proj" not in seen
    assert all(torch.equal(tape[address], seen["down_proj"][0][0]) for address in product)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["vit", "deit", "siglip_vision_model", "llama"])
def test_a_glob_finds_a_function_only_where_it_is_called(model_type):
    model = build_vision(model_type) if model_type != "llama" else build(model_type)
    points = th.points(model, "**:eager_attention_forward():attn_weights")
    given = tokens() if model_type == "llama" else torch.randn(1, 3, 16, 16)
    with torch.no_grad(), th.record(model, points) as tape:
        model(given)
    assert len(points) == 2
    assert len(tape) >= 2


def build_vision(model_type):
    config = CONFIG_MAPPING[model_type](
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    return AutoModel.from_config(config, attn_implementation="eager").eval()
