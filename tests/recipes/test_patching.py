"""Patching, compared with the same done by hand with PyTorch's own hooks, or with a model unrolled by hand."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.testing import untouched

patching = th.recipes.patching


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def inputs(*ids):
    return {"input_ids": torch.tensor([ids]), "use_cache": False}


CLEAN, CORRUPT = inputs(1, 2, 3, 4, 5), inputs(1, 9, 3, 8, 5)


def metric(output):
    return output.logits[0, -1, 3] - output.logits[0, -1, 4]


def patched_by_hand(model, source, base, layer, position):
    kept = {}
    handle = model.transformer.h[layer].register_forward_hook(lambda _m, _a, out: kept.update(out=out))
    with torch.no_grad():
        model(**source)
    handle.remove()

    def put(_module, _args, out):
        out = out.clone()
        out[:, position] = kept["out"][:, position]
        return out

    handle = model.transformer.h[layer].register_forward_hook(put)
    with torch.no_grad():
        value = metric(model(**base))
    handle.remove()
    return value


@pytest.mark.parametrize("mode", ["denoise", "noise"])
def test_activation_patching_is_what_hooks_by_hand_give(gpt2, mode):
    with untouched(gpt2):
        found = patching.activation(
            gpt2, CLEAN, CORRUPT, points="transformer.h.*", at=range(5), metric=metric, mode=mode
        )
    source, base = (CLEAN, CORRUPT) if mode == "denoise" else (CORRUPT, CLEAN)
    for layer in range(3):
        for position in range(5):
            truth = patched_by_hand(gpt2, source, base, layer, position)
            torch.testing.assert_close(found.values[0, layer, position], truth)
    with torch.no_grad():
        torch.testing.assert_close(found.clean[0], metric(gpt2(**CLEAN)))
        torch.testing.assert_close(found.corrupt[0], metric(gpt2(**CORRUPT)))
    assert found.points == ("transformer.h.0", "transformer.h.1", "transformer.h.2")
    assert found.effect[2, 4] == pytest.approx(1, abs=1e-4)  # The last position after the last block is all of it.
    assert found.effect[0, 0] == pytest.approx(0, abs=1e-4)  # The first token is the same in both.
    assert found.error.isnan().all()
    assert ("transformer.h.2", "4") in [(point, place) for point, place, _ in found.best(5)]
    assert "patching" in repr(found)


def test_several_pairs_give_statistics(gpt2):
    pairs = [
        (CLEAN, CORRUPT),
        (inputs(7, 2, 3, 4, 6), inputs(7, 2, 5, 4, 6)),
        (inputs(1, 1, 2, 2, 3), inputs(3, 2, 2, 1, 1)),
    ]
    clean, corrupt = map(list, zip(*pairs, strict=True))
    together = patching.activation(gpt2, clean, corrupt, points="transformer.h.*.mlp", metric=metric)
    alone = [patching.activation(gpt2, *pair, points="transformer.h.*.mlp", metric=metric).effect for pair in pairs]
    torch.testing.assert_close(together.effect, torch.stack(alone).mean(0))
    torch.testing.assert_close(together.error, torch.stack(alone).std(0) / 3**0.5)
    assert together.values.shape == (3, 3, 1)


def test_heads_by_name(gpt2):
    found = patching.activation(
        gpt2, CLEAN, CORRUPT, points="transformer.h.1.attn:query_states[2]",
        at={f"head {head}": th.at[:, head] for head in range(2)}, metric=metric,
    )  # fmt: skip
    assert found.places == ("head 0", "head 1")
    assert found.values.shape == (1, 1, 2)
    assert not torch.equal(found.values[0, 0, 0], found.values[0, 0, 1])


def test_attribution_is_exact_where_the_model_is_linear():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 1)).double()
    one, other = torch.randn(1, 4).double(), torch.randn(1, 4).double()
    units = {str(unit): th.at[:, unit] for unit in range(5)}
    estimate = patching.attribution(model, one, other, points="1", metric=lambda out: out.sum(), at=units, check=True)
    truth = patching.activation(model, one, other, points="1", metric=lambda out: out.sum(), at=units)
    torch.testing.assert_close(estimate.values, truth.values)
    assert estimate.agreement.correlation == pytest.approx(1)
    assert estimate.agreement.largest_gap < 1e-9


def test_attribution_is_gradient_times_difference_and_shows_how_it_agrees(gpt2):
    found = patching.attribution(gpt2, CLEAN, CORRUPT, points="transformer.h.*", at=range(5), metric=metric, check=True)
    # The same by hand: the gradient of the metric in the corrupt run, at a clone of the block's output.
    kept, gradient = {}, {}
    for name, each, store in (("clean", CLEAN, kept), ("corrupt", CORRUPT, gradient)):
        del name

        def hook(_module, _args, out, store=store):
            store["out"] = out = out.clone() if store is kept else out.detach().clone().requires_grad_()
            return out

        handle = gpt2.transformer.h[1].register_forward_hook(hook)
        value = metric(gpt2(**each))
        handle.remove()
    (grad,) = torch.autograd.grad(value, gradient["out"])
    truth = value.detach() + (grad * (kept["out"] - gradient["out"])).detach().sum((0, 2))
    torch.testing.assert_close(found.values[0, 1], truth)
    assert found.agreement.cases == 15
    assert found.agreement.correlation > 0.8
    assert "r = " in repr(found)


class Stream(nn.Module):
    """A residual stream with three parts that write into it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        x = x + self.a(x)
        x = x + self.b(x)
        x = x + self.c(x)
        return self.out(x)


def test_path_patching_lets_through_the_direct_way_alone():
    model = Stream()
    clean, corrupt = torch.randn(1, 4), torch.randn(1, 4)
    with untouched(model):
        found = patching.path(
            model, clean, corrupt, senders=["a", "b"], receivers="c:in", freeze="{a,b,c}",
            metric=lambda out: out.sum(),
        )  # fmt: skip
    with torch.no_grad():
        x = corrupt
        a, a_clean = model.a(x), model.a(clean)
        b = model.b(x + a)
        b_clean = model.b(clean + a_clean)
        stream = x + a + b  # What flows past the receiver is the corrupt run's own.
        from_a = stream + model.c(x + a_clean + b)
        from_b = stream + model.c(x + a + b_clean)
        truth = torch.stack([model.out(from_a).sum(), model.out(from_b).sum()])
        # What the difference at a does by way of b as well is something else.
        both_ways = stream + model.c(x + a_clean + model.b(x + a_clean))
    torch.testing.assert_close(found.values[0, :, 0], truth)
    assert not torch.allclose(truth[0], model.out(both_ways).sum())


def test_path_patching_in_a_transformer_against_hooks_by_hand(gpt2):
    h = "transformer.h"
    found = patching.path(
        gpt2, CLEAN, CORRUPT, senders=f"{h}.0.attn", receivers=f"{h}.2.mlp:in", freeze=f"{h}.*.{{attn,mlp}}",
        metric=metric,
    )  # fmt: skip
    parts = [gpt2.transformer.h[layer].get_submodule(name) for layer in range(3) for name in ("attn", "mlp")]

    def run(given, hooks):
        handles = [module.register_forward_hook(hook) for module, hook in hooks.items()]
        with torch.no_grad():
            output = gpt2(**given)
        for handle in handles:
            handle.remove()
        return metric(output)

    clean, corrupt = {}, {}
    for store, given in ((clean, CLEAN), (corrupt, CORRUPT)):
        run(given, {part: lambda module, _a, out, store=store: store.update({module: out}) for part in parts})
    arrived = {}
    hooks = {part: lambda module, _a, _o: corrupt[module] for part in parts[1:5]}
    hooks[parts[0]] = lambda module, _a, _o: clean[module]
    handle = parts[5].register_forward_pre_hook(lambda _m, args: arrived.update(value=args[0]))
    run(CORRUPT, hooks)
    handle.remove()
    handle = parts[5].register_forward_pre_hook(lambda _m, _a: (arrived["value"],))
    truth = run(CORRUPT, {})
    handle.remove()
    torch.testing.assert_close(found.values[0, 0, 0], truth)


def test_what_cannot_be_traced_is_reported(gpt2):
    with pytest.raises(th.RecipeError, match="no difference to trace"):
        patching.activation(gpt2, CLEAN, CLEAN, points="transformer.h.*", metric=metric)
    with pytest.raises(th.RecipeError, match="as many clean inputs as corrupt"):
        patching.activation(gpt2, [CLEAN], [CORRUPT, CORRUPT], points="transformer.h.*", metric=metric)
    with pytest.raises(th.AddressError):
        patching.activation(gpt2, CLEAN, CORRUPT, points="transformer.x.*", metric=metric)
    with pytest.raises(th.RecipeError, match="runs after the receivers"):
        patching.path(
            gpt2, CLEAN, CORRUPT, senders="transformer.h.2.mlp", receivers="transformer.h.0.mlp:in",
            freeze="transformer.h.*.mlp", metric=metric,
        )  # fmt: skip
