"""What all recipes have in common: they are there, and their results have settings and draw themselves."""

import lm_toys
import pytest
import torch
from recipe_models import images, reused

import tenterhook as th

R = th.recipes


def test_every_name_is_there_under_its_own_name():
    for name in R.__all__:
        assert getattr(R, name).__name__.rpartition(".")[2] == name
    assert set(R.__all__) <= set(dir(R))
    with pytest.raises(AttributeError, match=r"no recipe 'gradcan'; it has .*gradcam"):
        _ = R.gradcan


def total(output):
    return output.logits[:, -1, 3].mean()


PARTS = ["transformer.wte", "transformer.wpe", "transformer.h.*.{attn,mlp}"]
RESULTS = {
    "saliency": lambda _lm: R.saliency(reused(), images(), target=1),
    "pgd": lambda _lm: R.pgd(reused(), images().clamp(0, 1), torch.tensor([0, 1]), steps=2),
    "steering": lambda lm: R.steering(lm, lm_toys.ids(1), lm_toys.ids(2), point="transformer.h.1", pool=1),
    "ablate": lambda lm: R.ablate(lm, lm_toys.ids(), points="transformer.h.*", metric=total),
    "logit_lens": lambda lm: R.logit_lens(lm, lm_toys.ids(), points="transformer.h.*"),
    "causal_trace": lambda lm: R.causal_trace(lm, lm_toys.ids()[:1], subject=[1], points="transformer.h.*", samples=2),
    "direct_logits": lambda lm: R.direct_logits(lm, lm_toys.ids(), points=PARTS, target=7),
    "patching": lambda lm: R.patching.activation(
        lm, lm_toys.ids(1), lm_toys.ids(2), points="transformer.h.*", metric=total
    ),
    "probe": lambda _lm: R.probe(
        reused(), torch.rand(20, 3, 8, 8).double(), torch.arange(20) % 2, points=["conv2"], folds=2
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_has_its_settings_and_draws_itself(name, tmp_path):
    found = RESULTS[name](lm_toys.gpt2())
    assert isinstance(dict(found.settings), dict)
    assert found.settings or name == "saliency"
    found.show().savefig(tmp_path / "picture.png")
    assert th.page(tmp_path / "page.html", found) > 10_000
    assert repr(found).splitlines()[0]
