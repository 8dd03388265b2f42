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


HEADS = {
    "gpt2": (
        lm_toys.gpt2,
        ["transformer.wte", "transformer.wpe", "transformer.h.*.mlp"],
        "transformer.h.*.attn.c_proj",
    ),
    "llama": (lm_toys.llama, ["model.embed_tokens", "model.layers.*.mlp"], "model.layers.*.self_attn.o_proj"),
    "neox": (lm_toys.neox, ["gpt_neox.embed_in", "gpt_neox.layers.*.mlp"], "gpt_neox.layers.*.attention.dense"),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_add_up_to_their_attention_and_each_is_its_part_of_the_projection(name):
    build, points, projections = HEADS[name]
    model, ids = build(), lm_toys.ids()
    with untouched(model):
        found = th.recipes.direct_logits(model, ids, points=points, heads={projections: 2}, target=7)
    whole = th.recipes.direct_logits(model, ids, points=MODELS[name][1], target=7)
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
    torch.testing.assert_close(found.contributions.sum(0) + found.bias, logits[:, 7], atol=1e-5, rtol=1e-4)
    by_name = dict(zip(found.points, found.contributions, strict=True))
    for projection, single in found.heads.items():
        assert torch.equal(single, torch.stack([by_name[f"{projection} head {head}"] for head in range(2)]))
        attention = whole.contributions[whole.points.index(projection.rpartition(".")[0])]
        total = single.sum(0) + by_name[f"{projection} bias"]
        torch.testing.assert_close(total, attention, atol=1e-5, rtol=1e-4)
    # A head that writes nothing takes its contribution to the sum with it: by an edit of what comes to the projection.
    first = next(iter(found.heads))
    silent = {f"{first}:in": th.zero(at=th.at[..., :8])}
    with th.edit(model, silent):
        without = th.recipes.direct_logits(model, ids, points=points, heads={projections: 2}, target=7)
    torch.testing.assert_close(without.heads[first][0], torch.zeros(2), atol=1e-6, rtol=0)


def test_a_projection_is_linear_and_has_heads_of_one_width():
    build, points, projections = HEADS["gpt2"]
    with pytest.raises(th.RecipeError, match="16 features, which cannot be divided into 3 heads"):
        th.recipes.direct_logits(build(), lm_toys.ids(), points=points, heads={projections: 3}, target=7)
    with pytest.raises(th.RecipeError, match="do not add up to its output"):
        th.recipes.direct_logits(
            build(),
            lm_toys.ids(),
            points=[*points[:2], "transformer.h.*.attn"],
            heads={"transformer.h.*.mlp": 2},
            target=7,
        )
    with pytest.raises(th.RecipeError, match="do not add up to the stream"):  # Attention would count twice.
        th.recipes.direct_logits(build(), lm_toys.ids(), points=MODELS["gpt2"][1], heads={projections: 2}, target=7)


def test_many_bars_are_the_largest_ones():
    build, points, projections = HEADS["gpt2"]
    found = th.recipes.direct_logits(build(), lm_toys.ids(), points=points, heads={projections: 16}, target=7)
    assert len(found.points) == 5 + 3 * 17
    labels = [label.get_text() for label in found.show().axes[0].get_yticklabels()]
    assert len(labels) == 41
    assert {point for point, _ in found.best(5)} < set(labels)


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
    with pytest.raises(th.RecipeError, match=r"do not add up to the stream: off by .*\n.*everything that is added"):
        th.recipes.direct_logits(model, lm_toys.ids(), points=points[1:], target=7)


def test_a_norm_behind_the_parts_is_refused_until_the_points_are_those_that_are_added():
    model = lm_toys.gemma2()
    model.config.final_logit_softcapping = None
    layers = "model.layers.*"
    embedding = "model.embed_tokens"
    with pytest.raises(th.RecipeError, match="do not add up to the stream"):
        th.recipes.direct_logits(model, lm_toys.ids(), points=[embedding, f"{layers}.{{self_attn,mlp}}"], target=7)
    norms = f"{layers}.{{post_attention_layernorm,post_feedforward_layernorm}}"
    found = th.recipes.direct_logits(model, lm_toys.ids(), points=[embedding, norms], target=7)
    assert found.error < 1e-4


def test_bad_input_is_an_error_and_a_result_draws_itself(case):
    model, points = case
    with pytest.raises(th.RecipeError, match="a token is 0 to 49; got 50"):
        th.recipes.direct_logits(model, lm_toys.ids(), points=points, target=50)
    with pytest.raises(th.RecipeError, match="has 0 tensors of the stream's shape"):
        th.recipes.direct_logits(model, lm_toys.ids(), points=[*points, ":return"], target=5)
    found = th.recipes.direct_logits(model, lm_toys.ids(), points=points, target=5)
    assert "checked to" in repr(found)
    assert len(found.show().axes[0].patches) == len(found.points) + 1
