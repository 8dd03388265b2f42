"""Points by meaning: query, key, value, scores, pattern and heads of attention."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ViTConfig,
    ViTModel,
)

import tenterhook as th
from tenterhook.address.meanings import output_projection

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 40}
IDS = torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
IMAGE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}

FAMILIES = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=40, n_positions=32), IDS),
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL, num_key_value_heads=2), IDS),
    "sliding": (MistralForCausalLM, MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=3), IDS),
    "softcap": (Gemma2ForCausalLM, Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8), IDS),
    "bert": (BertModel, BertConfig(**SMALL), IDS),
    "vit": (ViTModel, ViTConfig(**IMAGE, image_size=8, patch_size=4), PIXELS),
}


def built(name, implementation="sdpa"):
    kind, config, inputs = FAMILIES[name]
    if name == "softcap":  # It has no other implementation.
        implementation = "eager"
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation=implementation).eval(), inputs


def attention(model, number=1):
    """Return the path of the attention module of a layer."""
    return [str(point).partition("@")[0] for point in th.points(model, "**@pattern")][number]


class Head(nn.Module):
    """Attention written with PyTorch's own function."""

    def __init__(self, causal=False):
        super().__init__()
        self.qkv, self.proj, self.causal = nn.Linear(16, 48), nn.Linear(16, 16), causal

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(out.transpose(1, 2).flatten(2))


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pattern_under_the_fast_kernel_is_that_of_eager_attention(name):
    (fast, inputs), (eager, _) = built(name), built(name, "eager")
    with torch.no_grad():
        with th.record(fast, "**@pattern") as tape:
            fast(inputs)
        weights = eager(inputs, output_attentions=True).attentions
    assert len(tape) == len(weights)
    for value, wanted in zip(tape.values(), weights, strict=True):
        assert torch.allclose(value, wanted, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_reading_leaves_every_bit_of_the_run_as_it_is(name):
    model, inputs = built(name)
    with torch.no_grad():
        with th.record(model, "**") as plain:
            model(inputs)
        with th.record(model, "**", "**@*") as read:
            model(inputs)
    for address, value in plain.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(read[address], value), address


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_fit_together(name):
    model, inputs = built(name)
    path = attention(model)
    with torch.no_grad(), th.record(model, f"{path}@*", f"{path}.**") as tape:
        model(inputs)
    values = {meaning: tape[f"{path}@{meaning}"] for meaning in ("q", "k", "v", "scores", "pattern", "z")}
    heads = values["q"].shape[2]
    value = values["v"].repeat_interleave(heads // values["v"].shape[2], 2)
    assert torch.allclose(values["scores"].softmax(-1), values["pattern"], atol=1e-6)
    assert torch.allclose(torch.einsum("bhqk,bkhd->bqhd", values["pattern"], value), values["z"], atol=1e-5)
    module = model.get_submodule(path)
    projection = getattr(module, output_projection(module) or "", None)
    if projection is not None:
        with torch.no_grad():
            out = projection(values["z"].flatten(2))
        bias = projection.bias if getattr(projection, "bias", None) is not None else 0
        assert torch.allclose(tape[f"{path}@result"].sum(2) + bias, out, atol=1e-5)


def test_one_head_and_padding():
    model, _ = built("gpt2")
    path, mask = attention(model), torch.ones_like(IDS)
    mask[0, :3] = 0
    with (
        torch.no_grad(),
        th.record(model, f"{path}@pattern", f"{path}@pattern[2]", f"{path}@z[2]", f"{path}@z") as tape,
    ):
        model(IDS, attention_mask=mask)
    assert torch.equal(tape[f"{path}@pattern[2]"], tape[f"{path}@pattern"][:, 2])
    assert torch.equal(tape[f"{path}@z[2]"], tape[f"{path}@z"][:, :, 2])
    assert tape[f"{path}@pattern"][0, :, 4:, :3].abs().max() == 0


@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_pytorchs_own_function(causal):
    torch.manual_seed(0)
    model, x = nn.Sequential(Head(causal)), torch.randn(2, 5, 16)
    with th.record(model, "0@*") as tape:
        model(x)
    q, k, v = (tape[f"0@{name}"].transpose(1, 2) for name in "qkv")
    scores = q @ k.mT / 2
    if causal:
        scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    assert torch.allclose(tape["0@pattern"], scores.softmax(-1), atol=1e-6)
    assert torch.allclose(tape["0@z"], (scores.softmax(-1) @ v).transpose(1, 2), atol=1e-6)


def test_generation_has_one_pattern_for_each_step():
    model, _ = built("llama")
    path, how = attention(model), {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    plain = model.generate(IDS, **how)
    with th.record(model, f"{path}@pattern", f"{path}@z") as tape:
        assert torch.equal(model.generate(IDS, **how), plain)
    assert [tuple(value.shape) for value in tape.calls(f"{path}@pattern")] == [
        (2, 4, 7, 7), (2, 4, 1, 8), (2, 4, 1, 9), (2, 4, 1, 10),
    ]  # fmt: skip
    assert tape.sequence(f"{path}@z").shape == (2, 10, 4, 8)


def test_layers_have_the_residual_stream_and_what_is_written_to_it():
    model, _ = built("llama")
    with torch.no_grad(), th.record(model, "model.layers.1@*", "model.layers.1", "model.layers.0") as tape:
        model(IDS)
    layer = "model.layers.1@"
    assert torch.equal(tape[f"{layer}resid"], tape["model.layers.1"])
    assert torch.equal(tape[f"{layer}resid_pre"], tape["model.layers.0"])
    total = tape[f"{layer}resid_pre"] + tape[f"{layer}attn_out"] + tape[f"{layer}mlp_out"]
    assert torch.allclose(total, tape[f"{layer}resid"], atol=1e-6)


# -- editing and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_an_edited_pattern_acts_as_in_eager_attention(name):
    (fast, inputs), (eager, _) = built(name), built(name, "eager")
    path = attention(fast)
    with torch.no_grad():
        outputs = []
        for model in (fast, eager):
            with th.edit(model, {f"{path}@pattern[1]": lambda p: torch.full_like(p, 1 / p.shape[-1])}):
                outputs.append(model(inputs)[0])
        plain = fast(inputs)[0]
    assert torch.allclose(*outputs, atol=1e-5)
    assert (outputs[0] - plain).abs().max() > 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_is_ablated_in_three_ways(name):
    model, inputs = built(name)
    path = attention(model)
    edits = [{f"{path}@z[2]": th.zero()}, {f"{path}@z": th.zero(at=th.at[:, :, 2])}, {f"{path}@pattern[2]": th.zero()}]
    outputs = []
    for edit in edits:
        with torch.no_grad(), th.edit(model, edit):
            outputs.append(model(inputs)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.allclose(outputs[0], outputs[2], atol=1e-5)


def test_an_edit_in_other_calls_leaves_the_fast_kernel():
    model, _ = built("gpt2")
    path = attention(model)
    with torch.no_grad():
        plain = model(IDS).logits
        with th.edit(model, {f"{path}@pattern#1": th.zero()}):
            first, second = model(IDS).logits, model(IDS).logits
    assert torch.equal(first, plain)
    assert not torch.allclose(second, plain)


@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_gradients_are_those_of_eager_attention(name):
    grads = []
    for how in ("sdpa", "eager"):
        model, _ = built(name, how)
        path = attention(model)
        wanted = [f"{path}@{each}" for each in ("q", "k[0]", "v", "scores", "pattern", "z[1]")]
        with th.record(model, *wanted, grad=True) as tape:
            model(IDS).logits.square().mean().backward()
        grads.append(dict(tape.grad))
    for address, value in grads[0].items():
        assert torch.allclose(value, grads[1][address], rtol=1e-3, atol=1e-8), address


def test_gradients_are_those_of_finite_differences():
    model = built("gpt2")[0].double()
    path = attention(model)
    wanted = [f"{path}@{each}" for each in ("q", "k[0]", "v", "scores", "pattern", "z[1]")]
    with th.record(model, *wanted, grad=True) as tape:
        model(IDS).logits.square().mean().backward()
    for address in wanted:
        step = torch.randn_like(tape[address]) * 1e-5

        def loss(sign, address=address, step=step):
            with torch.no_grad(), th.edit(model, {address: th.add(step * sign)}):
                return model(IDS).logits.square().mean()

        slope = (loss(1) - loss(-1)) / 2
        expected = (tape.grad[address] * step).sum()
        assert torch.allclose(slope, expected, rtol=1e-3, atol=1e-13), address


def test_editing_q_and_k_reaches_the_kernel():
    model, _ = built("llama")
    path = attention(model)
    with torch.no_grad(), th.edit(model, {f"{path}@q": th.zero()}), th.record(model, f"{path}@pattern") as tape:
        model(IDS)
    rows = tape[f"{path}@pattern"]
    assert torch.allclose(rows[0, 0, -1], torch.full((7,), 1 / 7))


def test_a_sweep_over_heads():
    model, _ = built("gpt2")
    paths = [attention(model, number) for number in (0, 1)]
    cases = [{f"{path}@z[{head}]": th.zero()} for path in paths for head in range(4)]
    found = th.sweep(model, cases, lambda out: out.logits[:, -1].mean(), input_ids=IDS, use_cache=False)
    alone = []
    for case in cases:
        with torch.no_grad(), th.edit(model, case):
            alone.append(model(input_ids=IDS).logits[:, -1].mean())
    assert torch.allclose(torch.as_tensor(found.values), torch.stack(alone), atol=1e-6)


def test_a_compiled_model_is_right():
    model, _ = built("gpt2")
    path = attention(model)
    with torch.no_grad():
        with th.record(model, f"{path}@pattern") as plain:
            model(IDS)
        compiled = torch.compile(model, backend="eager")
        with th.record(compiled, f"{path}@pattern") as tape:
            compiled(IDS)
    assert torch.allclose(tape[f"{path}@pattern"], plain[f"{path}@pattern"])


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_names_that_a_module_does_not_have():
    model, _ = built("gpt2")
    with pytest.raises(th.AddressError, match=r"Did you mean transformer\.h\.1\.attn@pattern"):
        th.record(model, "transformer.h.1@pattern")
    with pytest.raises(th.AddressError, match="register_meaning"):
        th.record(model, "lm_head@pattern")
    with pytest.raises(th.AddressError, match="has no heads"):
        th.record(model, "transformer.h.1@resid[2]")
    path = attention(model)
    with pytest.raises(th.AddressError, match="the heads 0 to 3"), th.record(model, f"{path}@z[4]"):
        model(IDS)
    with pytest.raises(th.EditError, match="@result is computed"), th.edit(model, {f"{path}@result": th.zero()}):
        model(IDS)


def test_multihead_attention_says_that_it_has_its_own_way_to_weights():
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"inner": nn.MultiheadAttention(16, 4, batch_first=True)}), torch.randn(2, 5, 16)
    with th.record(model, "inner@pattern") as tape:
        model["inner"](x, x, x, need_weights=False)
    with th.record(model, "inner") as whole:
        model["inner"](x, x, x, average_attn_weights=False)
    assert torch.allclose(tape["inner@pattern"], whole["inner"][1], atol=1e-6)
    with pytest.raises(th.NeverReached, match="need_weights=False"), th.record(model, "inner@pattern"):
        model["inner"](x, x, x)


def test_attention_that_computes_something_else_is_refused_and_not_guessed():
    class Other(Head):
        def forward(self, x):
            return attend_otherwise(self, x)

    def attend_otherwise(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        attention_interface = halved
        out, _ = attention_interface(self, q, k, v, None, scaling=0.5)
        return self.proj(out.flatten(2))

    def halved(_module, q, k, v, _mask, scaling):
        return ((q @ k.mT * scaling / 3).softmax(-1) @ v).transpose(1, 2), None

    model = nn.Sequential(Other())
    with pytest.raises(th.UnsupportedModel, match="cannot be computed"), th.record(model, "0@pattern"):
        model(torch.randn(2, 5, 16))


def test_a_meaning_of_ones_own():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.softmax = nn.Softmax(-1)

        def forward(self, x):
            gate = x.sigmoid()
            return self.softmax(x @ x.mT) @ gate

    th.register_meaning(Mine, "pattern", "softmax")
    th.register_meaning(Mine, "gate", ":gate")
    model, x = nn.Sequential(Mine()), torch.randn(2, 4, 3)
    with th.record(model, "0@*") as tape:
        model(x)
    assert torch.allclose(tape["0@pattern"], (x @ x.mT).softmax(-1))
    assert torch.equal(tape["0@gate"], x.sigmoid())
    with pytest.raises(th.AddressError, match="identifier"):
        th.register_meaning(Mine, "my pattern", "softmax")
    with pytest.raises(th.AddressError, match="class of modules"):
        th.register_meaning(Mine(), "pattern", "softmax")


def test_a_tape_with_meanings_is_saved_and_compared(tmp_path):
    model, _ = built("gpt2")
    with torch.no_grad(), th.record(model, "**@pattern", "transformer.h.0@resid") as tape:
        model(IDS)
    tape.save(tmp_path / "run.th")
    again = th.load(tmp_path / "run.th")
    assert list(again) == list(tape)
    assert all(torch.equal(again[address], tape[address]) for address in tape)


def test_a_name_with_an_at_sign_is_escaped():
    model = nn.ModuleDict({"a@b": nn.Linear(2, 2)})
    with th.record(model, r"a\@b") as tape:
        model["a@b"](torch.ones(1, 2))
    assert list(tape) == [r"a\@b"]
