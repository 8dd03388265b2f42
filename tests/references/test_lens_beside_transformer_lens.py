"""Lens, contributions, ablation, patching and steering beside TransformerLens, on the same weights.

It is given a copy of the model, because its bridge changes what it is given. It computes attention and norms in its own
way, so that the two agree to float32's accuracy and not to the bit.
"""

import pytest
import torch
from reference_models import gpt2_and_bridge

import tenterhook as th

pytestmark = [pytest.mark.references, pytest.mark.filterwarnings("ignore")]  # Theirs, while it loads.

IDS = torch.randint(1, 50, (2, 6), generator=torch.Generator().manual_seed(0))
OTHERS = torch.randint(1, 50, (2, 6), generator=torch.Generator().manual_seed(1))
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def pair():
    return gpt2_and_bridge()


def cached(bridge, ids):
    with torch.no_grad():
        return bridge.run_with_cache(ids)


def test_the_two_compute_the_same(pair):
    model, bridge = pair
    logits, _ = cached(bridge, IDS)
    torch.testing.assert_close(model(IDS).logits.detach(), logits, **CLOSE)


def test_the_logit_lens(pair):
    model, bridge = pair
    _, cache = cached(bridge, IDS)
    with torch.no_grad():
        theirs = torch.stack([bridge.unembed(bridge.ln_final(cache[f"blocks.{layer}.hook_out"])) for layer in range(3)])
    found = th.recipes.logit_lens(model, IDS, points="transformer.h.*")
    torch.testing.assert_close(found.logits, theirs, **CLOSE)


def test_direct_logit_attribution(pair):
    model, bridge = pair
    _, cache = cached(bridge, IDS)
    found = th.recipes.direct_logits(
        model, IDS, points=["transformer.wte", "transformer.wpe", "transformer.h.*.{attn,mlp}"], target=7
    )
    names = ["hook_embed", "hook_pos_embed"]
    names += [f"blocks.{layer}.{part}.hook_out" for layer in range(3) for part in ("attn", "mlp")]
    parts = torch.stack([cache[name].expand(2, -1, -1)[:, -1] for name in names])
    # Their own readout of a part: centred, over the scale that the last norm had, times its weight and the unembedding.
    scale = cache["ln_final.hook_scale"][:, -1]
    weight = model.transformer.ln_f.weight.detach()
    theirs = ((parts - parts.mean(-1, keepdim=True)) / scale * weight) @ model.lm_head.weight.detach()[7]
    torch.testing.assert_close(found.contributions, theirs, **CLOSE)


def test_direct_logit_attribution_of_single_heads(pair):
    model, bridge = pair
    _, cache = cached(bridge, IDS)
    found = th.recipes.direct_logits(
        model, IDS, points=["transformer.wte", "transformer.wpe", "transformer.h.*.mlp"],
        heads={"transformer.h.*.attn.c_proj": model.config.n_head}, target=7,
    )  # fmt: skip
    scale, weight = cache["ln_final.hook_scale"][:, -1], model.transformer.ln_f.weight.detach()
    for layer, single in enumerate(found.heads.values()):
        z = cache[f"blocks.{layer}.attn.hook_z"][:, -1]
        z = z.reshape(len(IDS), model.config.n_head, -1)
        out = bridge.blocks[layer].attn.W_O.detach()  # Their own weights of each head: [heads, width of a head, width].
        parts = torch.einsum("nhd,hdw->hnw", z, out)
        theirs = ((parts - parts.mean(-1, keepdim=True)) / scale * weight) @ model.lm_head.weight.detach()[7]
        torch.testing.assert_close(single, theirs, **CLOSE)


def test_activation_patching(pair):
    model, bridge = pair
    metric = lambda logits: logits[0, -1, 7] - logits[0, -1, 9]
    _, clean = cached(bridge, IDS[:1])
    theirs = torch.zeros(3, 6)
    for layer in range(3):
        for place in range(6):

            def put(value, hook, place=place, name=f"blocks.{layer}.hook_out"):
                value = value.clone()
                value[:, place] = clean[name][:, place]
                return value

            with torch.no_grad():
                logits = bridge.run_with_hooks(OTHERS[:1], fwd_hooks=[(f"blocks.{layer}.hook_out", put)])
            theirs[layer, place] = metric(logits)
    found = th.recipes.patching.activation(
        model, IDS[:1], OTHERS[:1], points="transformer.h.*", at=range(6), metric=lambda out: metric(out.logits)
    )
    torch.testing.assert_close(found.values[0], theirs, **CLOSE)


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_ablation(pair, how):
    model, bridge = pair
    _, cache = cached(bridge, OTHERS)
    theirs = []
    for layer in range(3):
        name = f"blocks.{layer}.mlp.hook_out"

        def change(value, hook, name=name):
            return torch.zeros_like(value) if how == "zero" else cache[name].mean(0).expand_as(value)

        with torch.no_grad():
            theirs.append(bridge.run_with_hooks(IDS, fwd_hooks=[(name, change)])[:, -1, 3].mean())
    found = th.recipes.ablate(
        model, IDS, points="transformer.h.*.mlp", metric=lambda out: out.logits[:, -1, 3].mean(), how=how,
        reference=OTHERS,
    )  # fmt: skip
    torch.testing.assert_close(found.values[:, 0], torch.stack(theirs), **CLOSE)


def test_steering(pair):
    model, bridge = pair
    name = "blocks.1.hook_out"
    (_, one), (_, other) = cached(bridge, IDS), cached(bridge, OTHERS)
    vector = one[name][:, -1].mean(0) - other[name][:, -1].mean(0)
    with torch.no_grad():
        theirs = bridge.run_with_hooks(IDS, fwd_hooks=[(name, lambda value, hook: value + 3 * vector)])
    found = th.recipes.steering(model, IDS, OTHERS, point="transformer.h.1", at=th.at[:, -1])
    torch.testing.assert_close(found.vector, vector, **CLOSE)
    with found.apply(model, 3), torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("meaning", "theirs"), [("pattern", "hook_pattern"), ("z", "hook_z"), ("result", "hook_result"), ("q", "hook_q")]
)
def test_patterns_and_heads(pair, meaning, theirs):
    model, bridge = pair
    bridge.set_use_attn_result(use_attn_result=True)
    _, cache = cached(bridge, IDS)
    names = [f"transformer.h.{layer}.attn@{meaning}" for layer in range(3)]
    with torch.no_grad(), th.record(model, *names) as tape:
        model(IDS)
    for layer, name in enumerate(names):
        torch.testing.assert_close(tape[name], cache[f"blocks.{layer}.attn.{theirs}"], **CLOSE)
