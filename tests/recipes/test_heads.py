"""Recipes for attention heads."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tenterhook as th
from tenterhook import recipes

LAYERS, HEADS, WIDTH, TOKENS, WORDS = 2, 4, 16, 8, 40


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=2,
        intermediate_size=32, vocab_size=WORDS,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().double()


def ids(seed, rows=1):
    return torch.randint(1, WORDS, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def metric(output):
    return output.logits[0, -1, 3] - output.logits[0, -1, 5]


def zero_by_hand(model, layer, head, position=slice(None)):
    """Return the metric with one head removed by a plain hook of PyTorch on the output projection."""
    size = WIDTH // HEADS

    def without(_module, args):
        value = args[0].clone()
        value[:, position, head * size : (head + 1) * size] = 0
        return (value,)

    handle = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(without)
    try:
        with torch.no_grad():
            return metric(model(ids(0)))
    finally:
        handle.remove()


def test_ablating_every_head_is_what_plain_hooks_give():
    model = llama()
    with torch.no_grad():
        base = metric(model(ids(0)))
    found = recipes.ablate_heads(model, ids(0), metric=metric)
    assert found.layers == tuple(f"model.layers.{layer}.self_attn@z" for layer in range(LAYERS))
    assert found.effect.shape == (LAYERS, HEADS, 1)
    for layer in range(LAYERS):
        for head in range(HEADS):
            assert abs(found.effect[layer, head, 0] - (zero_by_hand(model, layer, head) - base)) < 1e-9
    placed = recipes.ablate_heads(model, ids(0), metric=metric, at=[2, -1])
    assert placed.positions == ("2", "-1")
    for number, position in enumerate((2, -1)):
        assert abs(placed.effect[1, 3, number] - (zero_by_hand(model, 1, 3, position) - base)) < 1e-9


def test_patching_every_head_is_what_edits_one_by_one_give():
    model, point = llama(), "model.layers.1.self_attn@z"
    found = recipes.patch_heads(model, ids(0), ids(1), metric=metric, at=[-1])
    assert any("on a shared prefix" in line for line in found.how)
    with torch.no_grad(), th.record(model, point) as clean:
        there = metric(model(ids(0)))
    with torch.no_grad():
        here = metric(model(ids(1)))
        for head in range(HEADS):
            with th.edit(model, {f"{point}[{head}]": th.set(clean[point][:, -1:, head], at=th.at[:, -1:])}):
                effect = (metric(model(ids(1))) - here) / (there - here)
            assert abs(found.effect[1, head, 0] - effect) < 1e-9
    address, position, effect = found.best(1)[0]
    assert address.startswith("model.layers.")
    assert position == "-1"
    assert abs(effect) == found.effect.abs().max()


def test_paths_between_heads():
    model, receiver = llama(), "model.layers.1.self_attn@q[2]"
    found = recipes.head_paths(model, ids(0), ids(1), receivers=receiver, metric=metric)
    assert found.effect.shape == (LAYERS, HEADS, 1)
    assert not found.effect[1].any()  # A layer cannot reach its own queries.
    sender = "model.layers.0.self_attn@z[1]"
    # No other head runs between these two layers, so that nothing needs to be frozen.
    with torch.no_grad(), th.record(model, sender) as clean:
        there = metric(model(ids(0)))
    with torch.no_grad(), th.edit(model, {sender: th.set(clean[sender])}), th.record(model, receiver) as arrived:
        model(ids(1))
    with torch.no_grad():
        here = metric(model(ids(1)))
        with th.edit(model, {receiver: th.set(arrived[receiver])}):
            effect = (metric(model(ids(1))) - here) / (there - here)
    assert abs(found.effect[0, 1, 0] - effect) < 1e-9
    with pytest.raises(th.RecipeError, match="no sender runs before the receivers"):
        recipes.head_paths(model, ids(0), ids(1), receivers="model.layers.0.self_attn@q[2]", metric=metric)


def test_pictures_have_the_tokens_on_the_axes(tmp_path):
    pytest.importorskip("matplotlib")
    model = llama()
    found = recipes.attention_patterns(model, ids(0, 2), tokens=list("abcdefgh"))
    with torch.no_grad(), th.record(model, "**@pattern") as tape:
        model(ids(0, 2))
    assert list(found.patterns) == list(tape)
    figure = found.show(0, example=1, heads=[0, 3])
    assert [axes.get_title() for axes in figure.axes] == ["head 0", "head 3"]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == list("abcdefgh")
    drawn = torch.as_tensor(figure.axes[1].images[0].get_array())
    assert torch.allclose(drawn.double(), tape["model.layers.0.self_attn@pattern"][1, 3], atol=1e-6)
    assert "<img" in found._repr_html_()
    th.page(tmp_path / "run.html", tape, also=[found, found.show(0)])
    assert "attention patterns of 2 layers" in (tmp_path / "run.html").read_text()
    numbers = recipes.attention_patterns(model, ids(0))
    assert numbers.tokens == tuple(map(str, ids(0)[0].tolist()))
    assert len(recipes.ablate_heads(model, ids(0), metric=metric, at=[1, 2]).show().axes) == 2


def test_steering_at_chosen_steps():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=WIDTH, vocab_size=WORDS, bos_token_id=0, eos_token_id=None)
    model, point = GPT2LMHeadModel(config).eval(), "transformer.h.0"
    vector = recipes.steering(model, ids(0), ids(1), point=point, at=th.at[:, -1])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for steps, calls in ((2, "#2"), (range(1, 4), "#{1..3}")):
        with vector.apply(model, 40, steps=steps):
            texts = [model.generate(ids(2), **options) for _ in range(2)]
        with th.edit(model, {f"{point}{calls}": th.add(vector.vector, 40.0)}):
            expected = model.generate(ids(2), **options)
        assert torch.equal(texts[0], expected)
        assert torch.equal(texts[1], expected)  # Steps count from zero in each generation.
    with pytest.raises(th.RecipeError, match=r"range\(2, 5\); got -1"):
        vector.edits(steps=-1)
    with pytest.raises(th.RecipeError, match="leave out one"):
        vector.edits(steps=2, positions="prompt")


def test_a_model_without_heads_is_an_error():
    with pytest.raises(th.RecipeError, match="selects no attention heads"):
        recipes.ablate_heads(torch.nn.Linear(2, 2), torch.ones(1, 2), metric=lambda output: output.sum())
