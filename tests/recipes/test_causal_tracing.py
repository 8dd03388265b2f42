"""Causal tracing, compared with the same done by hooks by hand."""

import lm_toys
import pytest
import torch

import tenterhook as th
from tenterhook.testing import untouched

IDS = lm_toys.ids(3, 1, 6)
SUBJECT = (1, 2)
MODELS = {
    "gpt2": (lm_toys.gpt2, "transformer.h", "transformer.wte"),
    "llama": (lm_toys.llama, "model.layers", "model.embed_tokens"),
}


@pytest.fixture(params=MODELS)
def case(request):
    build, blocks, embedding = MODELS[request.param]
    return build(), blocks, embedding


def by_hand(model, blocks, embedding, samples, noise, token, window=1):
    """The loop: noise at the embedding, and the clean value of some blocks at a position."""
    blocks, embed = model.get_submodule(blocks), model.get_submodule(embedding)
    clean, std = {}, []
    handles = [block.register_forward_hook(lambda m, _a, out: clean.update({m: out})) for block in blocks]
    handles.append(embed.register_forward_hook(lambda _m, _a, out: std.append(float(out.double().std()))))
    with torch.no_grad():
        whole = model(IDS).logits[:, -1].softmax(-1)[0, token]
    for handle in handles:
        handle.remove()
    draws = torch.randn(samples, 2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    amount = (draws * std[0] * noise).float()

    def drown(_module, _args, out):
        out = out.clone()
        out[:, list(SUBJECT)] += amount
        return out

    def run(restore):
        handles = [embed.register_forward_hook(drown)]
        for block, place in restore:

            def put(module, _args, out, place=place):
                out = out.clone()
                out[:, place] = clean[module][:, place]
                return out

            handles.append(block.register_forward_hook(put))
        with torch.no_grad():
            found = model(IDS.expand(samples, -1)).logits[:, -1].softmax(-1)[:, token].mean()
        for handle in handles:
            handle.remove()
        return found

    half, rest = (window - 1) // 2, window // 2
    values = [
        [run([(blocks[near], p) for near in range(max(0, i - half), min(len(blocks), i + rest + 1))]) for p in range(6)]
        for i in range(len(blocks))
    ]
    return torch.tensor(values), float(whole), float(run([]))


@pytest.mark.parametrize("window", [1, 2, 3])
def test_it_is_the_loop_by_hand(case, window):
    model, blocks, embedding = case
    token = int(model(IDS).logits[0, -1].argmax())
    truth, clean, corrupt = by_hand(model, blocks, embedding, 4, 3.0, token, window)
    with untouched(model):
        found = th.recipes.causal_trace(model, IDS, subject=SUBJECT, points=f"{blocks}.*", samples=4, window=window)
    torch.testing.assert_close(found.values.float(), truth)
    assert found.clean == pytest.approx(clean, rel=1e-5)
    assert found.corrupt == pytest.approx(corrupt, rel=1e-4)
    assert found.settings["embedding"] == embedding


def test_what_must_come_back_does_and_what_cannot_does_not(case):
    model, blocks, _ = case
    found = th.recipes.causal_trace(model, IDS, subject=SUBJECT, points=f"{blocks}.*")
    assert found.share[2, 5] == pytest.approx(1, abs=1e-3)  # The last block at the last position is the answer.
    assert found.share[2, 1] == pytest.approx(0, abs=1e-3)  # After it, no other position matters.
    assert found.share[0, 0] == pytest.approx(0, abs=1e-3)  # Before the subject, nothing was changed.
    point, place, effect = found.best(1)[0]
    assert effect == float(found.effect.max())
    assert float(found.effect[found.points.index(point), place]) == effect


def test_the_embedding_itself_restored_undoes_its_own_noise(case):
    model, _, embedding = case
    found = th.recipes.causal_trace(model, IDS, subject=[2], points=embedding)
    assert found.share[0, 2] == pytest.approx(1, abs=1e-3)


def test_positions_target_and_metric(case):
    model, blocks, _ = case
    found = th.recipes.causal_trace(
        model, {"input_ids": IDS}, subject=[-5], points=f"{blocks}.1", positions=[1, -1], target=7, samples=2
    )
    assert found.positions == (1, 5)
    assert found.subject == (1,)
    assert found.clean == pytest.approx(float(model(IDS).logits[0, -1].softmax(-1)[7].detach()))
    scores = th.recipes.causal_trace(
        model, IDS, subject=[1], points=f"{blocks}.1", samples=2, metric=lambda out: out.logits[:, -1, 7].mean()
    )
    assert scores.clean == pytest.approx(float(model(IDS).logits[0, -1, 7].detach()), rel=1e-5)


def test_bad_input_is_an_error(case):
    model, blocks, _ = case
    trace = lambda ids=IDS, subject=SUBJECT, **kw: th.recipes.causal_trace(
        model, ids, subject=subject, points=f"{blocks}.*", **kw
    )
    with pytest.raises(th.RecipeError, match=r"one example is traced at a time.*\[2, 6, 16\]"):
        trace(lm_toys.ids())
    with pytest.raises(th.RecipeError, match="subject= are positions from 0 to 5; got 9"):
        trace(subject=[9])
    with pytest.raises(th.RecipeError, match="got none"):
        trace(subject=[])
    with pytest.raises(th.RecipeError, match="target= is a token, 0 to 49; got 50"):
        trace(target=50)
    with pytest.raises(th.RecipeError, match="noise= is a positive number"):
        trace(noise=0)
    with pytest.raises(th.RecipeError, match="samples= is a whole number"):
        trace(samples=0)
    with pytest.raises(th.RecipeError, match="changes nothing: no difference to trace"):
        trace(metric=lambda out: 1.0)
    found = trace(samples=2)
    assert "causal trace: clean" in repr(found)
    ticks = [label.get_text() for label in found.show(labels=list("abcdef")).axes[0].get_xticklabels()]
    assert ticks == ["a", "b*", "c*", "d", "e", "f"]
