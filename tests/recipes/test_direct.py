"""Direct logit attribution: the contributions are those of the parts, and add up to the score, or it is refused."""

import lm_toys
import pytest
import torch

import tenterhook as th
from tenterhook.testing import untouched

MODELS = {
    "gpt2": (lm_toys.gpt2, ["transformer.wte", "transformer.wpe", "transformer.h.*.{attn,mlp}"]),
    "llama": (lm_toys.llama, ["model.embed_tokens", "model.layers.*.{self_attn,mlp}"]),
    "neox": (lm_toys.neox, ["gpt_neox.embed_in", "gpt_neox.layers.*.{attention,mlp}"]),
}


@pytest.fixture(params=MODELS)
def case(request):
    build, points = MODELS[request.param]
    return build(), points


def test_the_contributions_add_up_to_the_score(case):
    model, points = case
    ids = lm_toys.ids()
    with untouched(model):
        found = th.recipes.direct_logits(model, ids, points=points, target=7)
        gap = th.recipes.direct_logits(model, ids, points=points, target=7, against=9)
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
    torch.testing.assert_close(found.contributions.sum(0) + found.bias, logits[:, 7], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gap.contributions.sum(0) + gap.bias, logits[:, 7] - logits[:, 9], atol=1e-5, rtol=1e-4)
    assert found.error < 1e-4
    assert found.contributions.shape == (len(found.points), 2)


def test_each_is_what_the_score_loses_with_the_scale_held(case):
    """By the formula of each norm, written out."""
    model, points = case
    ids = lm_toys.ids(1, 1)
    found = th.recipes.direct_logits(model, ids, points=points, target=7)
    with th.record(model, *found.points) as tape, torch.no_grad():
        model(ids)
    names = {"gpt2": "transformer.ln_f", "llama": "model.norm", "gpt_neox": "gpt_neox.final_layer_norm"}
    norm = model.get_submodule(names[model.config.model_type])
    kept = []
    handle = norm.register_forward_pre_hook(lambda _m, args: kept.append(args[0]))
    with torch.no_grad():
        model(ids)
    handle.remove()
    x = kept[0][0, -1].double()
    centred = "LayerNorm" in type(norm).__name__
    middle = x.mean() if centred else torch.zeros(())
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    scale = ((x - middle).square().mean() + eps).rsqrt()
    row = model.get_output_embeddings().weight[7].double().detach()
    for place, point in enumerate(found.points):
        value = tape[point]
        part = (value[0] if isinstance(value, tuple) else value)[0, -1].double()
        part = part - part.mean() if centred else part
        truth = (part * scale * norm.weight.double().detach()) @ row
        torch.testing.assert_close(found.contributions[place, 0].double(), truth, atol=1e-5, rtol=1e-4)


def test_another_position_can_be_asked_for(case):
    model, points = case
    found = th.recipes.direct_logits(model, lm_toys.ids(), points=points, target=3, at=th.at[:, 2])
    torch.testing.assert_close(found.score, model(lm_toys.ids()).logits[:, 2, 3].detach(), atol=1e-5, rtol=1e-4)


def test_a_norm_whose_weight_counts_from_one():
    model = lm_toys.gemma()
    torch.nn.init.normal_(model.model.norm.weight, std=0.3)
    stream = ["model.embed_tokens", "model.layers.*.{self_attn,mlp}"]
    found = th.recipes.direct_logits(model, lm_toys.ids(), points=stream, target=7)
    torch.testing.assert_close(
        found.contributions.sum(0) + found.bias, model(lm_toys.ids()).logits[:, -1, 7].detach(), atol=1e-5, rtol=1e-4
    )


def test_what_does_not_add_up_is_refused(case):
    model, points = case
    with pytest.raises(th.RecipeError, match=r"does not add up to the stream: off by .*\n.*everything that is added"):
        th.recipes.direct_logits(model, lm_toys.ids(), points=points[1:], target=7)


def test_a_norm_behind_the_parts_is_refused_until_the_points_are_those_that_are_added():
    model = lm_toys.gemma2()
    model.config.final_logit_softcapping = None
    layers = "model.layers.*"
    embedding = "model.embed_tokens"
    with pytest.raises(th.RecipeError, match="does not add up to the stream"):
        th.recipes.direct_logits(model, lm_toys.ids(), points=[embedding, f"{layers}.{{self_attn,mlp}}"], target=7)
    norms = f"{layers}.{{post_attention_layernorm,post_feedforward_layernorm}}"
    found = th.recipes.direct_logits(model, lm_toys.ids(), points=[embedding, norms], target=7)
    assert found.error < 1e-4


def test_bad_input_is_told_and_a_result_draws_itself(case):
    model, points = case
    with pytest.raises(th.RecipeError, match="a token is 0 to 49; got 50"):
        th.recipes.direct_logits(model, lm_toys.ids(), points=points, target=50)
    with pytest.raises(th.RecipeError, match="passes 0 tensors of the stream's shape"):
        th.recipes.direct_logits(model, lm_toys.ids(), points=[*points, ":return"], target=5)
    found = th.recipes.direct_logits(model, lm_toys.ids(), points=points, target=5)
    assert "checked to" in repr(found)
    assert len(found.show().axes[0].patches) == len(found.points) + 1
