"""Ablation, compared with hooks by hand."""

import lm_toys
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import untouched


def metric(output):
    return output.logits[:, -1, 3].mean()


def hooked(model, name, change, ids):
    handle = model.get_submodule(name).register_forward_hook(lambda _m, _a, out: change(out))
    with torch.no_grad():
        found = metric(model(ids))
    handle.remove()
    return float(found)


def kept(model, name, ids):
    values = []
    handle = model.get_submodule(name).register_forward_hook(lambda _m, _a, out: values.append(out))
    with torch.no_grad():
        model(ids)
    handle.remove()
    return values[0]


NAMES = [f"transformer.h.{layer}.mlp" for layer in range(3)]


def test_zero_is_nothing_in_its_place():
    model, ids = lm_toys.gpt2(), lm_toys.ids()
    with untouched(model):
        found = th.recipes.ablate(model, ids, points="transformer.h.*.mlp", metric=metric)
    truth = [hooked(model, name, torch.zeros_like, ids) for name in NAMES]
    assert found.values[:, 0].tolist() == pytest.approx(truth, rel=1e-5)
    assert found.base == pytest.approx(float(metric(model(ids)).detach()), rel=1e-5)
    torch.testing.assert_close(found.effect, found.values - found.base)
    assert found.points == tuple(NAMES)


def test_mean_is_what_usually_passes_there():
    model, ids, others = lm_toys.gpt2(), lm_toys.ids(), lm_toys.ids(5, 20)
    found = th.recipes.ablate(model, ids, points="transformer.h.*.mlp", metric=metric, how="mean", reference=others)
    for place, name in enumerate(NAMES):
        mean = kept(model, name, others).mean(0)
        assert float(found.values[place, 0]) == pytest.approx(hooked(model, name, mean.expand_as, ids), rel=1e-5)


def test_positions_and_a_reference_in_parts():
    model, ids = lm_toys.gpt2(), lm_toys.ids()
    others = [lm_toys.ids(5, 3), {"input_ids": lm_toys.ids(6, 5)}]
    found = th.recipes.ablate(
        model, ids, points=NAMES[1], metric=metric, how="mean", reference=others, at={"last": th.at[:, -1]}
    )
    mean = torch.cat([kept(model, NAMES[1], others[0]), kept(model, NAMES[1], others[1]["input_ids"])]).mean(0)

    def change(out):
        out = out.clone()
        out[:, -1] = mean[-1]
        return out

    assert float(found.values[0, 0]) == pytest.approx(hooked(model, NAMES[1], change, ids), rel=1e-5)
    assert found.places == ("last",)
    assert th.recipes.ablate(model, ids, points=NAMES, metric=metric, at=range(6)).values.shape == (3, 6)


def test_resample_is_what_passes_for_others_drawn_by_the_seed():
    model, ids, others = lm_toys.gpt2(), lm_toys.ids(), lm_toys.ids(5, 20)
    ask = lambda seed: th.recipes.ablate(
        model, ids, points=NAMES, metric=metric, how="resample", reference=others, samples=3, seed=seed
    )
    with untouched(model):
        found = ask(4)
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(20, (2,), generator=generator) for _ in range(3)]
    for place, name in enumerate(NAMES):
        values = kept(model, name, others)
        truth = torch.tensor([hooked(model, name, lambda _out, new=values[draw]: new, ids) for draw in rows])
        assert float(found.values[place, 0]) == pytest.approx(float(truth.mean()), rel=1e-5)
        assert float(found.spread[place, 0]) == pytest.approx(float(truth.std()), rel=1e-3)
    assert torch.equal(found.values, ask(4).values)
    assert not torch.equal(found.values, ask(5).values)


def test_bad_input_is_an_error_and_a_result_draws_itself():
    model, ids = lm_toys.gpt2(), lm_toys.ids()
    with pytest.raises(th.RecipeError, match='how= is "zero", "mean" or "resample"'):
        th.recipes.ablate(model, ids, points=NAMES, metric=metric, how="none")
    with pytest.raises(th.RecipeError, match="Cut or pad them to one length"):
        th.recipes.ablate(model, ids, points=NAMES, metric=metric, how="mean", reference=lm_toys.ids(0, 2, 4))
    with pytest.raises(th.RecipeError, match=r"shapes \[4, 16\] and \[5, 16\] at"):
        both = [lm_toys.ids(0, 2, 4), lm_toys.ids(0, 2, 5)]
        th.recipes.ablate(model, ids, points=NAMES, metric=metric, how="mean", reference=both)
    with pytest.raises(th.RecipeError, match="samples= is"):
        th.recipes.ablate(model, ids, points=NAMES, metric=metric, how="resample", samples=0)
    found = th.recipes.ablate(model, ids, points=NAMES, metric=metric)
    assert "zero ablation: base" in repr(found)
    assert len(found.show().axes) == 2


def test_any_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    units = {str(unit): th.at[:, unit] for unit in range(8)}
    x = torch.randn(3, 4)
    found = th.recipes.ablate(model, x, points="1", metric=lambda out: out.sum(), at=units)
    with torch.no_grad():
        hidden = model[:2](x)
        truth = [float(-(hidden[:, unit] * model[2].weight[0, unit]).sum()) for unit in range(8)]
    assert found.effect[0].tolist() == pytest.approx(truth, abs=1e-5)
