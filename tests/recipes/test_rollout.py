"""Attention rollout, compared with the attention that the models themselves hand out."""

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)  # fmt: skip

import tenterhook as th
from tenterhook.testing import Attention, untouched

R = th.recipes
SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 1]])


def multiplied(layers, heads="mean", residual=0.5):
    found = torch.eye(layers[0].shape[-1])
    for weights in layers:
        one = {"mean": weights.mean(1), "max": weights.amax(1)}[heads]
        one = one / one.sum(-1, keepdim=True)
        found = (residual * torch.eye(found.shape[-1]) + (1 - residual) * one) @ found
    return found


EAGER = {"vocab_size": 20, "attn_implementation": "eager"}
MODELS = {
    "BERT": (lambda: BertForSequenceClassification(BertConfig(**SMALL, **EAGER)), 0),
    "ALBERT, one layer three times": (
        lambda: AlbertForSequenceClassification(AlbertConfig(**SMALL, embedding_size=8, **EAGER)), 0
    ),
    "GPT-2": (lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, **EAGER)), -1),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_product_of_the_attention_that_the_model_returns(name):
    torch.manual_seed(0)
    make, token = MODELS[name]
    model = make()
    model.eval()
    with torch.no_grad():
        given = model(IDS, output_attentions=True).attentions
    with untouched(model):
        found = R.attention_rollout(model, IDS, token=token)
    torch.testing.assert_close(found.attribution, multiplied(given)[:, token])
    assert found.settings["layers"] == len(given)
    every = R.attention_rollout(model, IDS, token=None, heads="max", residual=0.3)
    torch.testing.assert_close(every.attribution, multiplied(given, "max", 0.3))


def test_the_map_of_a_vision_transformer_lies_over_the_image():
    torch.manual_seed(0)
    config = ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=3, attn_implementation="eager")
    model, x = ViTForImageClassification(config).eval(), torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        given = model(x, output_attentions=True).attentions
    found = R.attention_rollout(model, x, grid=(4, 4))
    torch.testing.assert_close(found.attribution, multiplied(given)[:, 0, 1:].unflatten(1, (4, 4)))
    assert found.map.shape == (2, 16, 16)
    with pytest.raises(th.RecipeError, match="grid="):
        R.attention_rollout(model, x, grid=(9, 9))
    with pytest.raises(th.RecipeError, match="no token 17; the model has 17"):
        R.attention_rollout(model, x, token=17)


@pytest.mark.parametrize("frozen", [False, True])
def test_pytorchs_own_encoder_is_asked_for_its_weights(frozen):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().requires_grad_(not frozen)
    x, given = torch.randn(3, 5, 8), []
    with untouched(model):
        found = R.attention_rollout(model, x, token=None)
    y = x
    for each in model.layers:
        given.append(each.self_attn(y, y, y, average_attn_weights=False)[1].detach())
        y = each(y)
    torch.testing.assert_close(found.attribution, multiplied(given), rtol=1e-4, atol=1e-5)


def test_weights_may_be_anywhere_and_are_missed_where_they_never_are():
    model, x = Attention(), torch.rand(2, 3, 4)
    with th.record(model, ":weights") as tape:
        model(x)
    found = R.attention_rollout(model, x, points=":weights", token=None)  # Without heads, it is one of them.
    torch.testing.assert_close(found.attribution, multiplied([tape[":weights"][:, None]]))
    with pytest.raises(th.RecipeError, match=r"no value at .* has that shape"):
        R.attention_rollout(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), torch.rand(2, 4))
    with pytest.raises(th.RecipeError, match="selects no value"):
        R.attention_rollout(nn.Linear(4, 3), torch.rand(2, 4))
    torch.manual_seed(0)
    fused = BertForSequenceClassification(BertConfig(**SMALL, vocab_size=20, attn_implementation="sdpa")).eval()
    with pytest.raises(th.RecipeError, match="attn_implementation='eager'"):
        R.attention_rollout(fused, IDS)
    with pytest.raises(th.RecipeError, match="heads="):
        R.attention_rollout(fused, IDS, heads="median")
