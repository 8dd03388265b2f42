"""Sweeps whose cases run only the last positions of a causal language model."""

import random

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import tenterhook as th
from tenterhook.replay import late_runs

TOKENS, WORDS = 20, 50


@pytest.fixture(autouse=True)
def any_number_of_positions(monkeypatch):
    """Let a few positions be worth runs of their own, as many are, and run them as on a GPU."""
    monkeypatch.setattr(late_runs, "TOGETHER", 0)
    monkeypatch.setattr(late_runs, "PACK_ON_CPU", True)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=WORDS, n_positions=64)
    return GPT2LMHeadModel(config).eval().double()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=WORDS,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().double()


def mistral():
    """A model with a sliding window."""
    torch.manual_seed(0)
    config = MistralConfig(
        num_hidden_layers=3, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=WORDS, sliding_window=7,
    )  # fmt: skip
    return MistralForCausalLM(config).eval().double()


def ids(rows=1, seed=0):
    return torch.randint(1, WORDS, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def metric(output):
    return output.logits[:, -1].logsumexp(-1) - output.logits[:, 3, 5]


def late(found):
    return [line for line in found.how if "on a shared prefix" in line]


def compare(model, cases, found, *args, **kwargs):
    """Compare the values of a sweep with runs of each case by itself."""
    for case, value in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(model, getattr(case, "edits", case)):
            torch.testing.assert_close(metric(model(*args, **kwargs)), value, rtol=1e-9, atol=1e-11)


def an_edit(draw, clean, at):
    return draw.choice(
        [
            lambda: th.set(clean, at=at),
            lambda: th.set(clean[at], at=at),
            lambda: th.zero(at=at),
            lambda: th.add(clean, scale=draw.random(), at=at),
            lambda: [th.scale(draw.random(), at=at), th.noise(seed=draw.randrange(9), at=at)],
        ]
    )()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [gpt2, llama, mistral])
def test_random_cases_are_what_they_are_by_themselves(make, seed, monkeypatch):
    way = ["packed", "in several batches", "two rows", "as rows"][seed]
    model, draw, rows = make(), random.Random(seed), 2 if way == "two rows" else 1
    monkeypatch.setattr(late_runs, "PACK_ON_CPU", way != "as rows")
    if way == "in several batches":
        monkeypatch.setattr(late_runs, "room_for", lambda *_: 7)
    layers = "transformer.h" if make is gpt2 else "model.layers"
    attention = f"{layers}.1.{'attn' if make is gpt2 else 'self_attn'}"
    points = [f"{layers}.{n}" for n in range(3)] + [f"{layers}.1.mlp:in", f"{attention}@z", f"{attention}@z[1]"]
    positions = [th.at[:, -1], th.at[:, TOKENS - 2], th.at[:, -3:-1], th.at[:, 17:, ..., 2], th.at[:, -1, ..., :3]]
    with torch.no_grad(), th.record(model, *points) as clean:
        model(ids(rows, seed=seed + 1))
    value = {point: clean[point] if isinstance(clean[point], torch.Tensor) else clean[point][0] for point in points}
    cases = []
    for _ in range(20):
        chosen = draw.sample(points, draw.choice([1, 1, 2]))
        cases.append({point: an_edit(draw, value[point], draw.choice(positions)) for point in chosen})
    found = th.sweep(model, cases, metric, ids(rows, seed=seed))
    assert late(found), found.how
    compare(model, cases, found, ids(rows, seed=seed))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_cases_are_packed_many_to_a_row(make, monkeypatch):
    model, ran = make(), []
    block = "transformer.h.1" if make is gpt2 else "model.layers.1"
    cases = [{block: th.scale(1 + n / 9, at=th.at[:, -3:])} for n in range(30)]
    model.register_forward_pre_hook(
        lambda _, args, kwargs: ran.append(kwargs.get("input_ids", args[0] if args else None).shape), with_kwargs=True
    )
    found = th.sweep(model, cases, metric, ids())
    assert late(found)
    assert ran == [(1, TOKENS), (2 + 2 + 6, TOKENS)]  # Two whole cases, two unedited ones, and six times six late.
    compare(model, cases, found, ids())


def test_patterns_over_a_window_of_keys_are_edited_in_whole_runs():
    model = mistral()
    point = "model.layers.1.self_attn@pattern"
    cases = [{point: th.noise(std=0.1, seed=seed, at=th.at[:, :, -1])} for seed in range(20)]
    cases += [{point: th.zero(at=th.at[:, :, -1, key])} for key in range(TOKENS)]
    found = th.sweep(model, cases, metric, ids())
    assert not late(found)
    compare(model, cases, found, ids())


class TwoStreams(nn.Module):
    """Computes two values of the same shape, which its parent adds."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, value):
        return self.one(value).tanh(), self.two(value).tanh()


class AddStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.streams = TwoStreams()

    def forward(self, value):
        one, two = self.streams(value)
        return one - 2 * two


@pytest.mark.parametrize("seed", range(3))
def test_cases_that_edit_different_parts_of_one_value(seed):
    model, draw = llama(), random.Random(seed)
    model.model.layers[1].mlp = AddStreams().double().eval()
    point = "model.layers.1.mlp.streams"
    cases = [
        {point: [th.zero(at=th.at[:, -2:], part=draw.randrange(2)), th.add(number, at=th.at[:, -1], part=0)]}
        if draw.random() < 0.3
        else {point: th.scale(number, at=th.at[:, -1], part=draw.randrange(2))}
        for number in range(20)
    ]
    found = th.sweep(model, cases, metric, ids())
    assert late(found), found.how
    compare(model, cases, found, ids())


def heads(model, at):
    points = [f"model.layers.{layer}.self_attn@z" for layer in range(3)]
    return th.grid(lambda layer, head: {points[layer]: th.zero(at=(*at, head))}, layer=range(3), head=range(4))


def test_every_head_at_the_last_position():
    model = llama()
    cases = heads(model, th.at[:, -1])
    found = th.sweep(model, cases, metric, ids())
    [how] = found.how
    assert how == (
        "12 cases ran only the positions from 19 on, of 20, on a shared prefix: the model is causal on this input, and "
        "the unedited input and 6 cases gave the same results in runs of the whole sequence"
    )
    compare(model, cases, found, ids())


def test_rows_with_a_mask_and_position_ids():
    model = llama()
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :5] = 0
    given = {"input_ids": ids(2), "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    cases = heads(model, th.at[:, -2])
    found = th.sweep(model, cases, metric, **given)
    assert late(found)
    compare(model, cases, found, **given)


def test_patterns_and_read_points():
    model = gpt2()
    cases = th.grid(
        lambda layer, head: {f"transformer.h.{layer}.attn@pattern": th.zero(at=th.at[:, head, -1, 4])},
        layer=range(3), head=range(2),
    )  # fmt: skip
    cases = [*cases, *cases]
    read = "transformer.h.2"
    found = th.sweep(model, cases, lambda value: value.sum((0, 2)), ids(), read=read)
    assert late(found)
    for case, value in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(model, case.edits), th.record(model, read) as tape:
            model(ids())
        torch.testing.assert_close(tape[read].sum((0, 2)), value)


def test_other_cases_run_whole_sequences():
    model = llama()
    block = "model.layers.1"
    cases = [
        *heads(model, th.at[:, -1]),
        {block: lambda value: value * 2},
        {block: th.zero(at=th.at[:, 3])},
        {block: th.zero(at=th.at[..., 3])},
        {block: th.zero(at=th.at[:, -1])},
        {f"{block}.mlp.up_proj.weight": th.scale(2.0, at=th.at[3])},
    ]
    found = th.sweep(model, cases, metric, ids())
    assert "13 cases ran only the positions" in late(found)[0]
    assert any(line.startswith("whole sequences for 4 cases") for line in found.how)
    compare(model, cases, found, ids())


def test_positions_of_several_groups():
    model = llama()
    cases = [case for position in (-1, -2, -4) for case in heads(model, th.at[:, position])]
    found = th.sweep(model, cases, metric, ids(), batch=5)
    assert [line.split(" on,")[0].split("from ")[1] for line in late(found)] == ["19", "18", "16"]
    compare(model, cases, found, ids())


def test_groups_with_few_positions_run_together(monkeypatch):
    monkeypatch.setattr(late_runs, "TOGETHER", 100)
    model = llama()
    cases = [case for position in (-1, -2, -4) for case in heads(model, th.at[:, position])]
    found = th.sweep(model, cases, metric, ids())
    assert [line.split(" on,")[0].split("from ")[1] for line in late(found)] == ["18", "16"]  # 24 cases, 48 positions.
    compare(model, cases, found, ids())


def test_few_positions_join_the_cases_that_run_whole_sequences(monkeypatch):
    monkeypatch.setattr(late_runs, "TOGETHER", 1000)
    model = llama()
    cases = [{"model.layers.1": th.zero(at=th.at[:, position])} for position in range(TOKENS)] * 2
    found = th.sweep(model, cases, metric, ids())
    assert not late(found)
    assert any(line.startswith("whole sequences for 40 cases") for line in found.how)
    compare(model, cases, found, ids())


class MeanOfPositions(nn.Module):
    """A module that mixes later positions into earlier ones."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, value):
        return self.inner(value) + value.mean(1, keepdim=True)


def test_a_model_that_is_not_causal_runs_whole_sequences():
    model = llama()
    model.model.layers[2].mlp = MeanOfPositions(model.model.layers[2].mlp).eval()
    cases = heads(model, th.at[:, -1])
    found = th.sweep(model, cases, metric, ids())
    assert not late(found)
    assert found.how[0].startswith("whole sequences for 12 cases: ")
    compare(model, cases, found, ids())


def test_a_module_that_mixes_later_positions_only_by_an_edit_is_not_trusted():
    model = llama()
    inner = model.model.layers[2].mlp.forward

    def mixing(value):
        """Mix positions if a later value is zero, as an edit makes it."""
        return inner(value) + ((value[:, -1:] == 0).all(-1, keepdim=True) * value.mean(1, keepdim=True))

    model.model.layers[2].mlp.forward = mixing
    cases = [{"model.layers.2.mlp:in": th.zero(at=th.at[:, -1])} for _ in range(9)]
    found = th.sweep(model, cases, metric, ids())
    assert not late(found)
    compare(model, cases, found, ids())


@pytest.mark.parametrize("kind", ["bert", "few", "embeds"])
def test_inputs_and_models_that_do_not_fit_say_why(kind):
    model, given = llama(), {"input_ids": ids()}
    cases = list(heads(model, th.at[:, -1]))
    if kind == "bert":
        config = BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=WORDS)
        model, why = BertForMaskedLM(config).eval().double(), "no key-value cache"
        cases = [{"bert.encoder.layer.0": th.scale(n, at=th.at[:, -1])} for n in range(9)]
    elif kind == "few":
        cases, why = [*cases[:7], *({"model.norm": th.scale(2.0, at=th.at[:, n])} for n in (1, 2))], "fewer than 8"
    else:
        given, why = {"inputs_embeds": model.get_input_embeddings()(ids()).detach()}, "not input_ids"
    found = th.sweep(model, cases, metric, **given)
    assert any("whole sequences" in line and why in line for line in found.how), found.how
    compare(model, cases, found, **given)


def test_an_edit_around_the_sweep_acts_on_whole_sequences():
    model = llama()
    cases = heads(model, th.at[:, -1])
    with th.edit(model, {"model.layers.0": th.scale(1 + 1e-3, at=th.at[:, 0])}):
        found = th.sweep(model, cases, metric, ids())
        assert found.how[0].startswith("whole sequences: another session is open")
        compare(model, cases, found, ids())


def test_a_case_that_fails_is_reported_as_ever():
    model = llama()
    cases = [*heads(model, th.at[:, -1]), {"model.layers.0": th.set(torch.ones(3).double(), at=th.at[:, -1])}]
    with pytest.warns(th.TenterhookWarning, match="1 of 13 cases failed"):
        found = th.sweep(model, cases, metric, ids())
    assert list(found.failed) == [12]
    compare(model, cases[:12], type("Found", (), {"values": found.values[:12]}), ids())


def test_an_interrupted_sweep_continues():
    model, calls = llama(), []

    def interrupted(output):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return metric(output)

    cases = heads(model, th.at[:, -1])
    with pytest.raises(th.SweepInterrupted) as caught:
        th.sweep(model, cases, interrupted, ids())
    compare(model, cases, caught.value.sweep.resume(), ids())


def test_values_of_the_whole_shape_are_set_in_batches_too():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    clean, x = torch.randn(1, 8).double(), torch.randn(1, 6).double()
    for change in (th.set, th.add, th.scale):
        cases = th.grid(lambda unit, change=change: {"1": change(clean, at=th.at[:, unit])}, unit=range(8))
        found = th.sweep(model, cases, lambda output: output[0, 0], x)
        assert "cases ran in batches" in found.how[1]
        for case, value in zip(cases, found.values, strict=True):
            with torch.no_grad(), th.edit(model, case.edits):
                torch.testing.assert_close(model(x)[0, 0], value)
