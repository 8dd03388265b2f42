"""Attribution between two dictionaries, beside finite differences and the formula of a linear model."""

import pytest
import torch
from lm_toys import gpt2, ids
from torch import nn

import tenterhook as th

FIRST, LAST = "transformer.h.0", "transformer.h.2"


@pytest.fixture(scope="module")
def model():
    return gpt2(3).double()


def dictionaries(size):
    torch.manual_seed(1)
    return [th.Dictionary(size, 24).double() for _ in range(2)]


def test_a_linear_model_gives_the_product_of_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)).double()
    one, other = dictionaries(6)
    x = torch.randn(3, 5).double()
    found = th.recipes.feature_edges(model, ("0", one), ("1", other), x)
    earlier = one.encode(model[0](x))
    paths = one.W_dec @ model[1].weight.T @ other.W_enc
    active = (other.encode(model[1](model[0](x))) > 0).double()
    for place, latent in enumerate(found.targets):
        expected = (earlier * paths[:, latent] * active[:, latent : latent + 1]).sum(0)
        assert torch.allclose(found.scores[place], expected, atol=1e-10)
    best, score = found.best(found.targets[0], 1)[0]
    assert score == pytest.approx(float(found.scores[0, best]))
    assert f"{found.targets[0]} from {best}" in repr(found)


def latent_after(model, one, other, latent, change, extra=None):
    seen = []
    with torch.no_grad(), th.splice(model, {FIRST: one, LAST: other}, error=True):
        with th.edit(model, {f"{FIRST}@latents": th.add(change), f"{LAST}@latents": seen.append, **(extra or {})}):
            model(ids(0, 1, 4))
    return seen[0][..., latent].sum()


def constants(model, one, other, points):
    with torch.no_grad(), th.splice(model, {FIRST: one, LAST: other}, error=True):
        with th.record(model, *points) as tape:
            model(ids(0, 1, 4))
    return {point: th.set(tape[point]) for point in points}


@pytest.mark.parametrize(
    ("freeze", "names"),
    [((), ()), (("attention",), ("attn@pattern",)), (("attention", "mlp"), ("attn@pattern", "mlp"))],
)
def test_scores_are_the_slopes_of_the_model_with_parts_held_constant(model, freeze, names):
    one, other = dictionaries(16)
    found = th.recipes.feature_edges(model, (FIRST, one), (LAST, other), ids(0, 1, 4), top=2, freeze=freeze)
    held = constants(model, one, other, [f"transformer.h.{layer}.{name}" for layer in (1, 2) for name in names])
    with torch.no_grad(), th.splice(model, {FIRST: one}), th.record(model, f"{FIRST}@latents") as tape:
        model(ids(0, 1, 4))
    latent = found.targets[0]
    for source in found.scores[0].abs().argsort(descending=True)[:3].tolist():
        step = torch.zeros(1, 4, 24).double()
        step[..., source] = 1e-6 * tape[f"{FIRST}@latents"][..., source]
        ends = [latent_after(model, one, other, latent, sign * step, held) for sign in (1, -1)]
        assert float((ends[0] - ends[1]) / 2e-6) == pytest.approx(float(found.scores[0, source]), rel=1e-4)


def test_points_may_be_arguments_meanings_and_transcoders(model):
    one, other = dictionaries(16)
    options = {"inputs": ids(0, 1, 4), "latents": [1, 2]}
    expected = th.recipes.feature_edges(model, (FIRST, one), ("transformer.h.1", other), **options)
    keys = ("transformer.h.0@resid", "transformer.h.2@resid_pre")
    found = th.recipes.feature_edges(model, (keys[0], one), (keys[1], other), **options)
    assert torch.allclose(found.scores, expected.scores)

    pairs = [(f"transformer.h.{layer}.ln_2", f"transformer.h.{layer}.mlp") for layer in (0, 2)]
    before, after = (f"{pair[1]}@latents" for pair in pairs)
    found = th.recipes.feature_edges(model, (pairs[0], one), (pairs[1], other), **options)
    step, seen = torch.zeros(1, 4, 24).double().requires_grad_(), []
    with th.splice(model, {pairs[0]: one, pairs[1]: other}, error=True), th.record(model, before) as tape:
        with th.edit(model, {before: th.add(step), after: seen.append}):
            model(ids(0, 1, 4))
    (slope,) = torch.autograd.grad(seen[0][..., 1].sum(), step)
    assert torch.allclose(found.scores[0], (slope * tape[before]).flatten(0, -2).sum(0))


def test_bad_input_is_named(model):
    pair = [(FIRST, dictionaries(16)[0]), (LAST, dictionaries(16)[1])]
    for options, message in (({"top": 0}, "top= is"), ({"latents": []}, "is empty"), ({"latents": [1.5]}, "no latent")):
        with pytest.raises(th.RecipeError, match=message):
            th.recipes.feature_edges(model, *pair, ids(0, 1, 4), **options)
    one, other = dictionaries(16)
    with pytest.raises(th.RecipeError, match="does it come first"):
        th.recipes.feature_edges(model, (LAST, one), (FIRST, other), ids(0, 1, 4))
    with pytest.raises(th.RecipeError, match="freeze= holds"):
        th.recipes.feature_edges(model, (FIRST, one), (LAST, other), ids(0, 1, 4), freeze=["norm"])
    with pytest.raises(th.RecipeError, match="latents 0 to 23"):
        th.recipes.feature_edges(model, (FIRST, one), (LAST, other), ids(0, 1, 4), latents=[99])
    with pytest.raises(th.RecipeError, match="not among the targets"):
        th.recipes.feature_edges(model, (FIRST, one), (LAST, other), ids(0, 1, 4), latents=[3]).best(4)
