"""th.skip: a module that is not called."""

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tenterhook as th

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def gpt2(layers=4):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_head=2, n_embd=16, vocab_size=40, n_positions=32, resid_pdrop=0, attn_pdrop=0)
    config.embd_pdrop, config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 0, 1, 2
    return GPT2LMHeadModel(config).eval()


def without(model, *blocks):
    """Return a copy of a GPT-2 that does not have these blocks."""
    shorter = copy.deepcopy(model)
    kept = [block for number, block in enumerate(shorter.transformer.h) if number not in blocks]
    for number, block in enumerate(kept):
        block.attn.layer_idx = number
    shorter.transformer.h = nn.ModuleList(kept)
    shorter.config.n_layer = len(kept)
    return shorter


class Counted(nn.Module):
    """Adds one, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.calls += 1
        return x * self.weight + 1


def test_a_skipped_module_is_not_called_and_its_input_is_its_output():
    model = nn.Sequential(Counted(), Counted(), Counted())
    with th.edit(model, {"1": th.skip()}), th.record(model, "*") as tape:
        output = model(torch.zeros(2, 3))
    assert [module.calls for module in model] == [1, 0, 1]
    assert torch.equal(tape["1"], tape["0"])
    assert torch.equal(output, torch.full((2, 3), 2.0))
    assert "forward" not in model[1].__dict__


def test_its_parameters_get_no_gradient():
    model = nn.Sequential(Counted(), Counted(), Counted())
    with th.edit(model, {"1": th.skip()}):
        model(torch.ones(2, 3)).sum().backward()
    assert [module.weight.grad is None for module in model] == [False, True, False]


@pytest.mark.parametrize("seed", range(6))
def test_skipped_blocks_give_the_model_without_them(seed):
    model = gpt2()
    blocks = torch.randperm(4, generator=torch.Generator().manual_seed(seed))[: 1 + seed % 3].tolist()
    with th.edit(model, {f"transformer.h.{number}": th.skip() for number in blocks}):
        logits = model(IDS).logits
        tokens = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(logits, without(model, *blocks)(IDS).logits)
    assert torch.equal(tokens, without(model, *blocks).generate(IDS, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_skips_it_too(reentrant):
    model = gpt2().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with th.edit(model, {"transformer.h.{1..2}": th.skip()}):
        loss = model(IDS, use_cache=False).logits.square().mean()
    loss.backward()  # After the session has ended.
    shorter = without(gpt2(), 1, 2).train()
    shorter(IDS).logits.square().mean().backward()
    mine, theirs = (each.transformer.h[0].mlp.c_fc.weight.grad for each in (model, shorter))
    assert torch.allclose(mine, theirs)
    assert model.transformer.h[1].mlp.c_fc.weight.grad is None


def test_a_compiled_model_skips_it():
    model = gpt2()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), th.edit(compiled, {"transformer.h.2": th.skip()}):
        assert torch.equal(compiled(IDS).logits, without(model, 2)(IDS).logits)


def test_a_value_or_a_function_takes_the_place_of_the_output():
    model = gpt2()
    with th.edit(model, {"transformer.h.1.attn": th.skip(lambda x, *_, **__: (torch.zeros_like(x), None))}):
        skipped = model(IDS).logits
    with th.edit(model, {"transformer.h.1.attn": lambda value: (torch.zeros_like(value[0]), *value[1:])}):
        assert torch.equal(skipped, model(IDS).logits)
    value = torch.ones(2, 4, 16)
    with th.edit(model, {"transformer.h.1": th.skip(value)}), th.record(model, "transformer.h.1") as tape:
        model(IDS)
    assert torch.equal(tape["transformer.h.1"], value)


def test_only_some_calls_are_skipped():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = Counted()

        def forward(self, x):
            for _ in range(5):
                x = self.step(x)
            return x

    model = Loop()
    with th.edit(model, {"step#{1..2}": th.skip()}):
        output = model(torch.zeros(1, 3))
    assert model.step.calls == 3
    assert torch.equal(output, torch.full((1, 3), 3.0))


def test_sweeps_and_replays_serve_what_it_leaves_alone():
    model = gpt2()
    cases = [{f"transformer.h.{number}": th.skip()} for number in range(4)]
    found = th.sweep(model, cases, lambda out: out.logits[:, -1].mean(), input_ids=IDS, use_cache=False)
    with torch.no_grad():
        alone = [without(model, number)(IDS).logits[:, -1].mean() for number in range(4)]
    assert torch.allclose(torch.as_tensor(found.values), torch.stack(alone))


def test_features_of_a_model_with_a_skipped_module():
    model = nn.Sequential(Counted(), Counted(), Counted())
    body = th.features(model, {"2": "last"})
    with th.edit(model, {"0": th.skip()}):
        assert torch.equal(body(torch.zeros(1, 3))["last"], torch.full((1, 3), 2.0))


def test_an_edit_after_the_skip_and_a_saved_skip(tmp_path):
    model = nn.Sequential(Counted(), Counted())
    th.save_edits(tmp_path / "skip.edits", {"1": th.skip()})
    (loaded,) = th.load_edits(tmp_path / "skip.edits").values()
    assert loaded == th.skip()
    assert repr(loaded) == "th.skip()"
    with th.edit(model, {"1": [loaded, th.scale(3.0)]}):
        assert torch.equal(model(torch.zeros(1, 3)), torch.full((1, 3), 3.0))


REFUSED = {
    "other size": (nn.Sequential(nn.Linear(3, 4)), "0", "in_features=3 and out_features=4"),
    "embedding": (nn.Sequential(nn.Embedding(3, 4)), "0", "does not have the shape"),
    "tuple": (nn.Sequential(nn.LSTM(3, 3)), "0", "returns a tuple"),
    "strided": (nn.Sequential(nn.Conv2d(3, 3, 3, stride=2, padding=1)), "0", "changes the size"),
    "pooling": (nn.Sequential(nn.MaxPool2d(2)), "0", "does not have the shape"),
    "structure": (gpt2(1), "transformer.h.0.attn", "returns a structure"),
    "argument": (gpt2(1), "transformer.h.0:in", "is not the output"),
    "whole model": (gpt2(1), ":return", "returns a structure"),
}


class Attends(nn.Module):
    """Returns what its child returns, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.inner, self.plain, self.way = nn.MultiheadAttention(4, 2), nn.Linear(4, 4), way
        self.forward = getattr(self, way)

    def directly(self, x):
        return self.inner(x, x, x)

    def by_a_variable(self, x):
        out = self.plain(x)
        out = self.inner(out, out, out)
        return out

    def by_a_method(self, x):
        return self._attend(x)

    def by_a_function(self, x):
        return attend_with(self, x)

    def by_a_condition(self, x):
        return self.plain(x) if x.numel() < 2 else self.inner(x, x, x)

    def _attend(self, x):
        return self.inner(x, x, x)

    def the_first_part(self, x):
        out = self.inner(x, x, x)
        out = out[0]
        return out

    def a_tensor_by_a_method(self, x):
        return self._first(x)

    def _first(self, x):
        return self.inner(x, x, x)[0]

    def a_tensor_of_a_child(self, x):
        out, _ = self.inner(x, x, x)
        return self.plain(out)


def attend_with(module, x):
    return x, module.plain(x)


RETURNS_TUPLES = ["directly", "by_a_variable", "by_a_method", "by_a_function", "by_a_condition"]


@pytest.mark.parametrize("way", RETURNS_TUPLES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_module_that_returns_the_tuple_of_another_is_refused(way, inside):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Attends(way)) if inside else Attends(way))
    why = r"returns (a|the result of another call, and .* returns a) (tuple|structure)"
    with pytest.raises(th.EditError, match=f"cannot be skipped as it is: .*{why}"):
        th.edit(model, {"0": th.skip()})


@pytest.mark.parametrize("way", ["the_first_part", "a_tensor_by_a_method", "a_tensor_of_a_child"])
def test_a_module_that_returns_a_part_of_the_tuple_of_another_is_skipped(way):
    model, x = nn.Sequential(Attends(way)), torch.randn(3, 4)
    with th.edit(model, {"0": th.skip()}):
        assert torch.equal(model(x), x)


@pytest.mark.parametrize(("model", "point", "why"), REFUSED.values(), ids=REFUSED)
def test_a_module_whose_input_cannot_be_its_output_is_refused(model, point, why):
    with pytest.raises(th.EditError, match=why):
        th.edit(model, {point: th.skip()})


def test_an_index_has_no_meaning():
    with pytest.raises(th.EditError, match="at= and part="):
        th.skip(at=th.at[:, 1])


def test_convolutions_and_blocks_that_keep_their_shape_are_skipped():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.GELU(), nn.Dropout(0.5))
    image = torch.randn(1, 3, 5, 5)
    with th.edit(model, {"*": th.skip()}):
        assert torch.equal(model(image), image)


def test_llama_blocks_are_skipped():
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=40
    )
    model = LlamaForCausalLM(config).eval()
    shorter = copy.deepcopy(model)
    del shorter.model.layers[1]
    with th.edit(model, {"model.layers.1": th.skip()}):
        assert torch.equal(model(IDS).logits, shorter(IDS).logits)
