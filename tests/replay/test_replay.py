"""Replay on real models: what comes out is what a whole run gives, to the last bit, and only what has to run runs."""

import collections
import sys
import threading

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tenterhook as th
from tenterhook.testing import untouched


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval(), {"input_ids": torch.arange(8)[None], "use_cache": False}


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=50,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), {"input_ids": torch.arange(8)[None], "use_cache": False}


def bert():
    torch.manual_seed(0)
    config = BertConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=50)
    inputs = {"input_ids": torch.arange(8)[None], "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    return BertModel(config).eval(), inputs


def doubled(value):
    return (value[0] * 2, *value[1:]) if isinstance(value, tuple) else value * 2


def first(output):
    """All that comes out, in one tensor."""
    return torch.cat(
        [output[name].flatten() for name in ("logits", "last_hidden_state", "pooler_output") if name in output]
    )


EDITS = [
    (gpt2, "transformer.h.0"),
    (gpt2, "transformer.h.2"),
    (gpt2, "transformer.h.2.mlp"),
    (gpt2, "transformer.h.3.attn.c_attn"),
    (gpt2, "transformer.h.2.mlp:in"),
    (gpt2, "transformer.h.2:hidden_states"),
    (gpt2, "transformer.h.2.attn:query_states[*]"),
    (gpt2, "transformer.h.2.mlp.c_fc.weight"),
    (gpt2, "transformer.wte.weight"),
    (gpt2, "lm_head"),
    (gpt2, ":return"),
    (llama, "model.layers.1"),
    (llama, "model.layers.2.self_attn"),
    (llama, "model.layers.2.mlp.gate_proj"),
    (llama, "model.rotary_emb"),
    (bert, "encoder.layer.1"),
    (bert, "encoder.layer.2.attention.self"),
    (bert, "pooler"),
]


@pytest.mark.parametrize(("make", "address"), EDITS, ids=lambda each: getattr(each, "__name__", each))
def test_an_edited_run_is_the_same_replayed_and_whole(make, address):
    model, inputs = make()
    change = {address: (lambda out: type(out)({**out, "logits": out.logits * 2})) if address == ":return" else doubled}
    plain = first(model(**inputs))
    with th.edit(model, change):
        whole = first(model(**inputs))
    with untouched(model):
        with th.record(model, replay=True) as tape:
            model(**inputs)
        with th.replay(model, tape) as session, th.edit(model, change):
            replayed = first(model(**inputs))
    assert torch.equal(replayed, whole)
    assert not torch.equal(replayed, plain)
    if "wte" not in address:
        assert len(session.served) > 0


Pair = collections.namedtuple("Pair", ["left", "right"])  # noqa: PYI024


class Pairs(nn.Linear):
    def forward(self, x):
        return Pair(super().forward(x), x).left


class ByVersion(nn.Linear):
    def forward(self, x):
        return super().forward(x) if sys.version_info >= (3, 8) else x


@pytest.mark.parametrize("kind", [Pairs, ByVersion])
def test_a_call_that_reads_constants_of_python_is_served(kind):
    model, x = nn.Sequential(kind(2, 2), nn.Linear(2, 2)).eval(), torch.ones(1, 2)
    with torch.no_grad():
        with th.record(model, replay=True) as tape:
            model(x)
        with th.replay(model, tape) as session, th.edit(model, {"1": doubled}):
            model(x)
    assert "0" in session.served.calls


def modules_that_run(function):
    """The modules whose forward runs, seen by a profiler: a list that forwards append to would be their state."""
    ran = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_name == "forward":
            ran.append(frame.f_locals["self"])

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return ran


def test_the_largest_calls_are_served_and_what_is_inside_them_never_runs():
    model, inputs = gpt2()
    with th.record(model, replay=True) as tape:
        model(**inputs)
    with th.replay(model, tape) as session, th.edit(model, {"transformer.h.3": doubled}):
        ran = modules_that_run(lambda: model(**inputs))
    kinds = (type(model.transformer.h[1].mlp.c_fc), nn.LayerNorm)
    assert [module for module in ran if isinstance(module, kinds)] == [model.transformer.ln_f]
    assert {f"transformer.h.{layer}" for layer in range(4)} <= set(session.served.calls)
    assert not any("mlp" in path for path in session.served.calls)


def test_without_an_edit_the_whole_output_is_served():
    model, inputs = gpt2()
    with th.record(model, replay=True) as tape:
        output = model(**inputs)
    with th.replay(model, tape) as session:
        again = model(**inputs)
    assert type(again) is type(output)
    assert torch.equal(again.logits, output.logits)
    assert session.served.calls == {":return": 1}


def test_without_a_tape_the_first_run_is_recorded():
    model, inputs = gpt2()
    with th.edit(model, {"transformer.h.3": doubled}):
        whole = model(**inputs).logits
    with th.replay(model) as session:
        plain = model(**inputs).logits
        assert len(session.served) == 0
        with th.edit(model, {"transformer.h.3": doubled}):
            assert torch.equal(model(**inputs).logits, whole)
        assert len(session.served) > 3
        assert torch.equal(model(**inputs).logits, plain)
    assert session.nbytes > 0


def test_what_is_recorded_in_a_replay_is_what_flows():
    model, inputs = gpt2()
    points = ["transformer.h.1", "transformer.h.0.mlp.act", "transformer.h.3:in", "transformer.h.3.attn:query_states"]
    with th.edit(model, {"transformer.h.2": doubled}), th.record(model, *points) as whole:
        model(**inputs)
    with th.record(model, replay=True) as tape:
        model(**inputs)
    with th.replay(model, tape), th.edit(model, {"transformer.h.2": doubled}), th.record(model, *points) as replayed:
        model(**inputs)
    assert set(whole) == set(replayed)
    for address in whole:
        assert torch.equal(whole[address], replayed[address]), address


def test_only_what_serving_some_edits_needs_is_kept_on_demand():
    model, inputs = gpt2()
    with th.record(model, replay=True) as everything:
        model(**inputs)
    with th.record(model, replay=["transformer.h.2.mlp", "transformer.h.3"]) as some:
        model(**inputs)
    assert 0 < some.script.nbytes < everything.script.nbytes
    assert "calls can be served" in repr(some.script)
    for address in ("transformer.h.2.mlp", "transformer.h.3"):
        with th.edit(model, {address: doubled}):
            whole = model(**inputs).logits
        with th.replay(model, some) as session, th.edit(model, {address: doubled}):
            assert torch.equal(model(**inputs).logits, whole)
        assert "transformer.h.1" in session.served.calls


def test_several_edits_at_once_and_one_after_the_other():
    model, inputs = gpt2()
    with th.record(model, replay=True) as tape:
        model(**inputs)
    h = "transformer.h"
    with th.replay(model, tape):
        for one, other in [(f"{h}.1", f"{h}.3"), (f"{h}.3", f"{h}.1"), (f"{h}.2", "lm_head")]:
            with th.edit(model, {one: doubled}), th.edit(model, {other: doubled}):
                replayed = model(**inputs).logits
            with th.edit(model, {one: doubled, other: doubled}):
                again = model(**inputs).logits
            assert torch.equal(replayed, again)
    with th.edit(model, {"transformer.h.2": doubled, "lm_head": doubled}):
        assert torch.equal(replayed, model(**inputs).logits)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(3, 4), nn.Linear(4, 2)

    def forward(self, steps):
        state = torch.zeros(steps.shape[1], 4)
        for step in steps:
            state = self.cell(step, state)
        return self.out(state)


@pytest.mark.parametrize("call", [0, 2, 4])
def test_calls_of_one_module_before_the_edited_one_are_served(call):
    torch.manual_seed(0)
    model, steps = Recurrent(), torch.randn(5, 2, 3)
    with th.edit(model, {f"cell#{call}": doubled}):
        whole = model(steps)
    with th.record(model, replay=True) as tape:
        model(steps)
    with th.replay(model, tape) as session, th.edit(model, {f"cell#{call}": doubled}):
        assert torch.equal(model(steps), whole)
    assert session.served.calls["cell"] == call + 1


def test_a_tape_of_several_runs_serves_the_one_with_the_same_inputs():
    model, inputs = gpt2()
    other = {**inputs, "input_ids": inputs["input_ids"].flip(1)}
    with th.record(model, replay=True) as tape:
        model(**inputs)
        model(**other)
    with th.edit(model, {"transformer.h.3": doubled}):
        wanted = [model(**each).logits for each in (other, inputs)]
    with th.replay(model, tape) as session, th.edit(model, {"transformer.h.3": doubled}):
        for each, want in zip((other, inputs), wanted, strict=True):
            # Equal inputs will do; they need not be the same tensors.
            copied = {name: value.clone() if name == "input_ids" else value for name, value in each.items()}
            assert torch.equal(model(**copied).logits, want)
    assert session.served.calls["transformer.h.3"] == 2


def test_a_stopped_run_can_be_served_up_to_there():
    model, inputs = gpt2()
    with th.record(model, "transformer.h.1", replay=True, stop=True) as tape:
        model(**inputs)
    with th.replay(model, tape) as session, th.edit(model, {"transformer.h.2": doubled}):
        replayed = model(**inputs).logits
    with th.edit(model, {"transformer.h.2": doubled}):
        assert torch.equal(replayed, model(**inputs).logits)
    assert set(session.served.calls) >= {"transformer.h.0", "transformer.h.1"}


def test_a_stop_in_a_replay_runs_nothing_but_what_lies_between():
    model, inputs = gpt2()
    with th.record(model, replay=True) as tape:
        model(**inputs)
    with th.edit(model, {"transformer.h.1": doubled}), th.record(model, "transformer.h.2") as whole:
        model(**inputs)
    with th.replay(model, tape), th.edit(model, {"transformer.h.1": doubled}):
        with th.record(model, "transformer.h.2", stop=True) as tape:
            model(**inputs)
            pytest.fail("the run goes on")
    assert torch.equal(tape["transformer.h.2"], whole["transformer.h.2"])


def test_another_thread_is_not_served():
    model, inputs = gpt2()
    with th.record(model, replay=True) as tape:
        output = model(**inputs).logits
    found = []
    with th.replay(model, tape) as session:
        model(**inputs)
        with torch.no_grad():
            thread = threading.Thread(target=lambda: found.append(model(**inputs).logits))
            thread.start()
            thread.join()
    assert session.served.calls == {":return": 1}
    assert torch.equal(found[0], output)


def test_a_model_in_float64_and_in_bfloat16():
    for dtype in (torch.float64, torch.bfloat16):
        model, inputs = llama()
        model = model.to(dtype)
        with th.edit(model, {"model.layers.2": doubled}):
            whole = model(**inputs).logits
        with th.record(model, replay=True) as tape:
            model(**inputs)
        with th.replay(model, tape) as session, th.edit(model, {"model.layers.2": doubled}):
            assert torch.equal(model(**inputs).logits, whole)
        assert len(session.served) > 2


def test_the_report_draws_itself():
    model, inputs = gpt2()
    with th.record(model, replay=True) as tape:
        model(**inputs)
    with th.replay(model, tape) as session, th.edit(model, {"transformer.h.3": doubled}):
        model(**inputs)
    text = repr(session.served)
    assert "transformer.h.2" in text
    assert "gives back its input" in text  # Its dropout, in evaluation.
    assert "<table" in session.served._repr_html_()


# -- starting from the middle -----------------------------------------------------------------------------------------


def test_run_from_a_point_gives_what_an_edited_run_gives():
    model, inputs = gpt2()
    with th.record(model, "transformer.h.2", replay=True) as tape:
        model(**inputs)
    value = tape["transformer.h.2"] * 0.5
    with th.edit(model, {"transformer.h.2": th.set(value)}):
        whole = model(**inputs).logits
    assert torch.equal(th.run_from(model, tape, {"transformer.h.2": value}).logits, whole)
    assert torch.equal(th.run_from(model, tape, {"transformer.h.2": value}, **inputs).logits, whole)


def test_the_gradient_flows_into_the_value_that_was_given():
    model, inputs = gpt2()
    with torch.enable_grad():
        with th.record(model, "transformer.h.2", replay=True, grad=True) as tape:
            loss = model(**inputs).logits[0, -1].max()
            loss.backward()
        truth = tape.grad["transformer.h.2"]
        value = tape["transformer.h.2"].clone().requires_grad_()
        model.zero_grad()
        th.run_from(model, tape, {"transformer.h.2": value}).logits[0, -1].max().backward()
    assert torch.equal(value.grad, truth)
    assert model.transformer.h[1].mlp.c_fc.weight.grad is None  # It was served, a constant.
    assert model.transformer.h[3].mlp.c_fc.weight.grad is not None


def test_run_from_says_what_it_needs():
    model, inputs = gpt2()
    with th.record(model, replay=True) as tape:
        model(**inputs)
        model(**inputs)
    with pytest.raises(th.ReplayError, match="2 runs"):
        th.run_from(model, tape, {"transformer.h.2": torch.zeros(1, 8, 16)})
    with pytest.raises(th.ReplayError, match="give the values"):
        th.run_from(model, tape, {})
    with pytest.raises(th.EditError, match="does not broadcast"):
        th.run_from(model, tape, {"transformer.h.2": torch.zeros(1, 9, 16)}, **inputs)
