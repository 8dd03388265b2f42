"""Edits of variables: which place is meant, and edits that nothing reads."""

import warnings

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tenterhook as th

X = torch.ones(2)


class Twice(nn.Module):
    def forward(self, x):
        q = x * 2
        for _ in range(2):
            q = q + 1
        r = torch.relu(q)
        return torch.relu(r) + q


# --- several places ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [":q", ":relu()"])
@pytest.mark.parametrize("kind", ["changes", "grad"])
def test_an_edit_of_a_name_with_several_places_asks_which_one(name, kind):
    with pytest.raises(th.AmbiguousCall) as error:
        th.edit(Twice(), **{kind: {name: th.zero()}})
    text = str(error.value)
    assert f"{name}[0]  line " in text
    assert f"{name}[1]  line " in text
    assert f"'{name}[*]'" in text


def test_a_glob_over_modules_asks_too():
    with pytest.raises(th.AmbiguousCall, match=r"0:q\[1\]"):
        th.edit(nn.Sequential(Twice(), Twice()), {"*:q": th.zero()})


@pytest.mark.parametrize(
    ("name", "result"), [(":q[0]", 4.0), (":q[1]", 0.0), (":q[-1]", 0.0), (":q[*]", 0.0), (":q#0", 4.0), (":q#1", 2.0)]
)
def test_an_edit_of_one_place_or_of_all_acts_there(name, result):
    model = Twice()
    with th.edit(model, {name: th.zero()}):
        assert model(X).tolist() == [result, result]


def test_a_star_records_every_place():
    model = Twice()
    with th.record(model, ":q[*]") as tape:
        model(X)
    assert [value[0].item() for value in tape.calls(":q[*]")] == [2, 3, 4]


@pytest.mark.parametrize("recorded", [":q", ":q[*]"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_tape_of_all_places_answers_for_one(recorded, saved, tmp_path):
    model, x = Twice(), torch.ones(2, requires_grad=True)
    with th.record(model, recorded, grad=True) as tape:
        model(x).sum().backward()
    if saved:
        tape.save(tmp_path / "tape.th")
        tape = th.load(tmp_path / "tape.th")
    assert tape[":q[0]"].tolist() == [2, 2]
    assert [value[0].item() for value in tape.calls(":q[1]")] == [3, 4]
    assert tape[":q[1]#1"].tolist() == [4, 4]
    assert tape[":q[-1]#0"].tolist() == [3, 3]
    assert tape.grad[":q[0]"].tolist() == [2, 2]
    assert ":q[0]" in tape
    assert ":q[2]" not in tape
    with pytest.raises(th.AmbiguousCall, match=r":q\[1\]#0"):
        tape[":q[1]"]
    with pytest.raises(th.NotRecorded):
        tape[":q[2]"]


# --- edits that nothing reads -----------------------------------------------------------------------------------------


class Unread(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        used = unused = self.fc(x)  # noqa: F841
        other = torch.relu(used)  # noqa: F841
        scale = 3  # noqa: F841
        return used + 1


@pytest.mark.parametrize(
    ("name", "use"), [(":unused", "'fc', the output"), (":other", r"':relu\(\)'"), (":scale", "':return', the module")]
)
def test_an_edit_that_nothing_reads_warns_and_names_the_point_to_use(name, use):
    with pytest.warns(th.TenterhookWarning, match=use) as caught:
        th.edit(Unread(), {name: lambda value: value})
    assert caught[0].filename == __file__


def test_an_edit_that_is_read_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        th.edit(Unread(), {":used": th.zero()})


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=20, attn_implementation="eager")
    return LlamaForCausalLM(config).eval(), torch.arange(5)[None]


def test_attention_weights_that_the_caller_drops_warn_and_name_those_that_are_used():
    model, ids = llama()
    plain = model(ids).logits
    with pytest.warns(th.TenterhookWarning, match="changes nothing") as caught:
        session = th.edit(model, {"model.layers.0.self_attn:attn_weights": th.zero()})
    with session:
        assert torch.equal(model(ids).logits, plain)
    named = str(caught[0].message).split("Edit '")[1].split("'")[0]
    with th.edit(model, {named: th.zero()}):
        assert not torch.allclose(model(ids).logits, plain)
