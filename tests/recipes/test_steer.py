"""Steering, compared with hooks by hand; in generation with a cache, with the whole sequence run at once."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tenterhook as th
from tenterhook.testing import no_leak, untouched


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=64, bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    return GPT2LMHeadModel(config).eval(), "transformer.h.1"


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=50, max_position_embeddings=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), "model.layers.1"


@pytest.fixture(params=[gpt2, llama], ids=["gpt2", "llama"])
def pair(request):
    return request.param()


def sentences(seed, count=6, length=5):
    return torch.randint(1, 50, (count, length), generator=torch.Generator().manual_seed(seed))


def value_by_hand(model, point, ids):
    kept = []
    handle = model.get_submodule(point).register_forward_hook(lambda _m, _a, out: kept.append(out))
    with torch.no_grad():
        model(ids)
    handle.remove()
    return kept[0]


def found_at_last(model, point):
    return th.recipes.steering(model, sentences(1), sentences(2), point=point, at=th.at[:, -1])


LENGTHS = (5, 2, 4, 3)


def padded(seed, side="right"):
    """Sentences of several lengths, as one input with a mask, and one by one without any padding."""
    alone = [sentences(seed + place, 1, length) for place, length in enumerate(LENGTHS)]
    ids, mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64), torch.zeros(len(LENGTHS), max(LENGTHS))
    for row, each in enumerate(alone):
        part = slice(0, each.shape[1]) if side == "right" else slice(-each.shape[1], None)
        ids[row, part], mask[row, part] = each[0], 1
    return {"input_ids": ids, "attention_mask": mask.long()}, alone


@pytest.mark.parametrize("how", [{"pool": 1}, {"at": "last"}, {"at": th.at[:, 0]}], ids=["mean", "last", "first"])
def test_padding_does_not_count(pair, how):
    model, point = pair
    (one, one_alone), (other, other_alone) = padded(10), padded(20)
    wanted = th.recipes.steering(model, one_alone, other_alone, point=point, **how)
    found = th.recipes.steering(model, one, other, point=point, **how)
    torch.testing.assert_close(found.vector, wanted.vector, atol=1e-5, rtol=1e-4)
    everything = th.recipes.steering(model, one, other, point=point, mask=None, pool=1)
    assert how != {"pool": 1} or not torch.allclose(everything.vector, wanted.vector, atol=1e-3)


def test_the_last_position_is_that_of_each_sentence_on_either_side(pair):
    model, point = pair
    left = [padded(seed, "left")[0] for seed in (10, 20)]
    found = th.recipes.steering(model, *left, point=point, at="last")
    torch.testing.assert_close(found.vector, th.recipes.steering(model, *left, point=point, at=th.at[:, -1]).vector)


def test_a_position_that_is_padding_cannot_be_asked_for(pair):
    model, point = pair
    right = [padded(seed)[0] for seed in (10, 20)]
    for how in ({"at": th.at[:, -1]}, {}, {"at": th.at[:, 3:], "pool": 1}):
        with pytest.raises(th.RecipeError, match=r'is padding in \d of the examples(.|\n)*at="last"'):
            th.recipes.steering(model, *right, point=point, **how)
    empty = {**right[0], "attention_mask": torch.zeros(4, 5, dtype=torch.int64)}
    for how in ({"at": "last"}, {"pool": 1}):
        with pytest.raises(th.RecipeError, match="is padding in 4 of the examples"):
            th.recipes.steering(model, empty, right[1], point=point, **how)


def test_a_mask_has_to_be_one(pair):
    model, point = pair
    with pytest.raises(th.RecipeError, match=r"mask='token_type_ids' is an argument of the model.*got nothing"):
        th.recipes.steering(model, sentences(1), sentences(2), point=point, mask="token_type_ids", pool=1)
    added = {"input_ids": sentences(1), "attention_mask": torch.tensor([[0.0, 0, 0, 0, -1e4]]).repeat(6, 1)}
    with pytest.raises(th.RecipeError, match="attention_mask has numbers below zero"):
        th.recipes.steering(model, added, added, point=point, pool=1)
    with pytest.raises(th.RecipeError, match="or \"last\"; got 'end'"):
        th.recipes.steering(model, sentences(1), sentences(2), point=point, at="end")


def test_a_mask_is_found_among_positional_arguments_and_must_fit_the_value():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 4)

        def forward(self, x, attention_mask):
            return self.inner(x) * attention_mask[..., None]

    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 3, 3)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    found = th.recipes.steering(model, (x, mask), (x + 1, mask), point="inner", pool=1)
    value, other = model.inner(x).detach(), model.inner(x + 1).detach()
    wanted = ((value[0, :2].mean(0) + value[1, 0]) - (other[0, :2].mean(0) + other[1, 0])) / 2
    torch.testing.assert_close(found.vector, wanted)


def test_a_mask_that_does_not_fit_the_value_is_refused():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 4)

        def forward(self, x, attention_mask):
            return self.inner(x[:, 0]) * attention_mask[:, :1]

    given = (torch.randn(2, 3, 3), torch.tensor([[1, 1, 0], [1, 0, 0]]))
    with pytest.raises(th.RecipeError, match=r"the value is \[2, 4\].*does not fit its first dimensions"):
        th.recipes.steering(First(), given, given, point="inner")


def test_the_vector_is_the_difference_of_the_means(pair):
    model, point = pair
    one, other = value_by_hand(model, point, sentences(1)), value_by_hand(model, point, sentences(2))
    with untouched(model):
        last = found_at_last(model, point)
        mean = th.recipes.steering(model, sentences(1), sentences(2), point=point, pool=1)
        whole = th.recipes.steering(model, sentences(1), sentences(2), point=point)
    torch.testing.assert_close(last.vector, one[:, -1].mean(0) - other[:, -1].mean(0))
    torch.testing.assert_close(mean.vector, one.mean((0, 1)) - other.mean((0, 1)))
    torch.testing.assert_close(whole.vector, one.mean(0) - other.mean(0))
    assert last.vector.shape == (16,)
    assert whole.vector.shape == (5, 16)


def test_where_the_examples_lie_along_the_vector(pair):
    model, point = pair
    found = found_at_last(model, point)
    assert float(found.positive.mean()) == pytest.approx(found.norm / 2, rel=1e-5)
    assert float(found.negative.mean()) == pytest.approx(-found.norm / 2, rel=1e-5)
    wins = [float(a > b) for a in found.positive for b in found.negative]
    assert found.auc == pytest.approx(sum(wins) / 36)
    assert found.unit().norm == pytest.approx(1)


def test_inputs_of_different_lengths_are_averaged_example_by_example(pair):
    model, point = pair
    short, long = sentences(1, 1, 3), sentences(2, 1, 7)
    found = th.recipes.steering(model, [short, {"input_ids": long}], [(sentences(3),)], point=point, pool=1)
    one = (value_by_hand(model, point, short).mean(1) + value_by_hand(model, point, long).mean(1))[0] / 2
    torch.testing.assert_close(found.vector, one - value_by_hand(model, point, sentences(3)).mean((0, 1)))
    with pytest.raises(th.RecipeError, match=r"a mean needs one.\n.*pool=1"):
        th.recipes.steering(model, [short, long], sentences(3), point=point)
    with pytest.raises(th.RecipeError, match=r"\[3, 16\] and \[5, 16\]"):
        th.recipes.steering(model, short, sentences(3), point=point)


def test_the_model_runs_no_further_than_the_point(pair):
    model, point = pair
    calls = []
    handle = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    th.recipes.steering(model, [sentences(1), sentences(3)], sentences(2), point=f"{point}#0", at=th.at[:, -1])
    assert not calls
    th.recipes.steering(model, [sentences(1), sentences(3)], sentences(2), point=point, at=th.at[:, -1])
    handle.remove()
    assert len(calls) == 1  # To see whether the point is passed again.


def hooked(model, point, change):
    return model.get_submodule(point).register_forward_hook(lambda _m, _a, out: change(out))


def test_a_steered_run_is_what_a_hook_by_hand_gives(pair):
    model, point = pair
    found, ids = found_at_last(model, point), sentences(5)

    def last(out):
        out = out.clone()
        out[:, -1] += 3 * found.vector
        return out

    changes = {"all": lambda out: out + 3 * found.vector, "last": last, "prompt": lambda out: out + 3 * found.vector}
    for positions, change in changes.items():
        handle = hooked(model, point, change)
        truth = model(ids).logits
        handle.remove()
        with untouched(model), found.apply(model, 3, positions=positions):
            torch.testing.assert_close(model(ids).logits, truth)
    with found.apply(model, 3, point=[point, point.replace("1", "0")], positions=th.at[:, 1:3]):
        assert not torch.allclose(model(ids).logits, truth)


@pytest.mark.parametrize("positions", ["all", "last", "prompt"])
def test_generation_with_a_cache_is_steered_like_whole_sequences(pair, positions):
    model, point = pair
    found, prompt, steps = found_at_last(model, point).unit(), sentences(7, 2, 4), 12
    with untouched(model), found.apply(model, 4, positions=positions):
        tokens = model.generate(prompt, max_new_tokens=steps, do_sample=False)
    assert not torch.equal(tokens, model.generate(prompt, max_new_tokens=steps, do_sample=False))
    # The truth without a cache: at each step the whole sequence, with the vector at the positions that are meant.
    meant = {"all": slice(0, None), "last": slice(3, None), "prompt": slice(0, 4)}[positions]

    def change(out):
        out = out.clone()
        out[:, meant] += 4 * found.vector
        return out

    truth = prompt
    handle = hooked(model, point, change)
    with torch.no_grad():
        for _ in range(steps):
            chosen = model(truth, use_cache=False).logits[:, -1].argmax(-1)
            truth = torch.cat([truth, chosen[:, None]], 1)
    handle.remove()
    assert torch.equal(tokens, truth)


def test_a_vector_is_passed_on_as_a_file(pair, tmp_path):
    model, point = pair
    found, prompt = found_at_last(model, point), sentences(7, 2, 4)
    edits = found.edits(5, positions="last")
    with th.edit(model, edits):
        wanted = model.generate(prompt, max_new_tokens=8, do_sample=False)
    th.save_edits(tmp_path / "calm.edits", edits, notes={"model": "toy"})
    with th.edit(model, th.load_edits(tmp_path / "calm.edits")):
        assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), wanted)


def test_a_model_of_another_type_is_steered_too(pair):
    model, point = pair
    found = found_at_last(model, point)
    model.double()
    with found.apply(model, 2):
        steered = model(sentences(5)).logits
    assert steered.dtype is torch.float64
    assert not torch.allclose(steered, model(sentences(5)).logits)


def test_any_point_of_any_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(108, 2))
    one, other = torch.rand(9, 1, 8, 8), torch.rand(7, 1, 8, 8)
    with torch.no_grad():
        truth = model[0](one).mean(0) - model[0](other).mean(0)
    found = th.recipes.steering(model, one, other, point="0")
    torch.testing.assert_close(found.vector, truth)
    inside = th.recipes.steering(model, one, other, point="3:in")
    assert inside.vector.shape == (108,)


def test_nothing_stays_behind(pair):
    model, point = pair
    with no_leak():
        found = found_at_last(model, point)
        with found.apply(model, 2):
            model(sentences(5))
        del found


def test_bad_input_is_an_error(pair):
    model, point = pair
    found = found_at_last(model, point)
    with pytest.raises(th.RecipeError, match="nothing to steer by"):
        th.recipes.steering(model, sentences(1), sentences(1), point=point)
    with pytest.raises(th.RecipeError, match="the list is empty"):
        th.recipes.steering(model, [], sentences(1), point=point)
    with pytest.raises(th.RecipeError, match="one point is needed"):
        th.recipes.steering(model, sentences(1), sentences(2), point="**")
    with pytest.raises(th.AddressError):
        th.recipes.steering(model, sentences(1), sentences(2), point="nowhere")
    with pytest.raises(th.RecipeError, match="positions= is 'all', 'last', 'prompt' or an index"):
        found.edits(positions="first")
    with pytest.raises(th.RecipeError, match="finite number"):
        found.edits(float("nan"))
    with pytest.raises(th.RecipeError, match=r"do not fit the value at .*\[6, 5, 16\]"):
        th.recipes.steering(model, sentences(1), sentences(2), point=point, at=th.at[:, 9])
    with pytest.raises(th.EditError, match="does not broadcast"):
        with th.edit(model, {point: th.add(torch.ones(3))}):
            model(sentences(1))
    with pytest.raises(th.RecipeError, match="or a list of these; got a int"):
        th.recipes.steering(model, 3, sentences(2), point=point)


def test_it_prints_and_draws_itself(pair):
    model, point = pair
    found = found_at_last(model, point)
    assert repr(found).startswith(f"steering at {point!r}: [16], length ")
    assert found.show().axes[0].get_xlabel() == f"along the vector at {point}"
