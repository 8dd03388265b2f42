"""Inputs that are easy to get wrong: each is an error of tenterhook's own that names the place and the fix."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tenterhook as th

X = torch.linspace(-1, 1, 40).reshape(2, 5, 4)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


def total(out):
    return out.sum()


@pytest.mark.parametrize("edit", [th.zero, th.noise, lambda at: th.set(1.0, at=at), lambda at: th.scale(2.0, at=at)])
def test_an_index_in_a_list_or_as_text_is_refused_when_the_edit_is_made(edit):
    with pytest.raises(th.EditError, match=r"at=th\.at\[:, 3\], without the brackets"):
        edit(at=[th.at[:, 3]])
    with pytest.raises(th.EditError, match=r"is text\. Write the index itself: at=th\.at\[:,3\]"):
        edit(at=":,3")


def test_a_list_of_positions_is_an_index():
    net = model()
    with th.edit(net, {"0": th.zero(at=[0, 1])}), th.record(net, "0") as tape:
        net(X)
    assert not tape["0"].any()


def test_an_index_beyond_the_sequence_names_the_point_the_index_and_the_shape():
    net = model()
    with pytest.raises(th.EditError, match=r"'0': at=th\.at\[:, 9\] does not fit float32\[2, 5, 4\]"):
        with th.edit(net, {"0": th.zero(at=th.at[:, 9])}):
            net(X)
    with pytest.raises(th.RecipeError, match=r"an index that is not valid for '0', \[2, 5, 4\]"):
        th.recipes.patching.activation(net, X, X + 1, points=["0"], at=[9], metric=total)


def test_a_metric_that_is_text_is_answered_with_an_example():
    for call in (
        lambda: th.sweep(model(), [{"0": th.zero()}], "logit_diff", X),
        lambda: th.recipes.patching.activation(model(), X, X + 1, points=["0"], metric="logit_diff"),
    ):
        with pytest.raises(th.TenterhookError, match=r"(?s)got 'logit_diff'.*metric=lambda out"):
            call()


def test_run_from_without_a_tape_or_without_values_says_what_to_record():
    with pytest.raises(th.ReplayError, match=r"got None\. Record one with th\.record\(model, \.\.\., replay=True"):
        th.run_from(model(), None, {"1": X})
    net = model()
    with th.record(net, replay=True) as tape:
        net(X)
    with pytest.raises(th.ReplayError, match=r"\{'h\.6': value\}\); got a str"):
        th.run_from(net, tape, "1")


def test_points_with_inputs_of_a_wrong_shape_names_the_module_and_what_was_given():
    with pytest.raises(th.SessionError, match=r"inputs=float32\[2, 7\], in '0' \(Linear\)"):
        th.points(model(), inputs=torch.ones(2, 7))


def test_loading_another_kind_of_file_says_what_it_is_and_who_reads_it(tmp_path):
    net = model()
    with th.record(net, "0") as tape:
        net(X)
    tape.save(tmp_path / "tape")
    th.save_edits(tmp_path / "edits", {"0": th.zero()})
    torch.save({"a": 1}, tmp_path / "torch")
    save_file({"w": torch.ones(2)}, tmp_path / "plain", {"format": "pt"})
    (tmp_path / "json").write_text(json.dumps({"a": 1}))
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": 1}))
    th.harvest(net, X.reshape(10, 4), "0", to=tmp_path / "rows", batch_size=5, progress=False)
    said = {
        "edits": "th.load_edits reads", "torch": r"torch\.load reads", "plain": "load_file can read", "json": "JSON",
        "pickle": "pickle", "rows": r"th\.open reads",
    }  # fmt: skip
    for name, match in said.items():
        with pytest.raises(th.TapeFileError, match=match):
            th.load(tmp_path / name)
    with pytest.raises(th.EditFileError, match=r"a tape, which th\.load reads"):
        th.load_edits(tmp_path / "tape")


def test_columns_and_points_asked_as_a_dict_are_answered_with_the_right_form(tmp_path):
    net = model()
    th.harvest(net, X.reshape(10, 4), "0", to=tmp_path / "rows", batch_size=5, progress=False)
    with pytest.raises(th.NotRecorded, match=r"one column, store\['h\.6'\]"):
        th.open(tmp_path / "rows")[{"0": "features"}]
    with pytest.raises(th.SelectorError, match="Pass only its addresses, as a list"):
        th.harvest(net, X.reshape(10, 4), {"0": "features"}, to=tmp_path / "more", progress=False)


def test_a_tokenizers_dict_given_to_an_attribution_says_what_to_give():
    for recipe in (th.recipes.saliency, th.recipes.integrated_gradients, th.recipes.input_x_gradient):
        with pytest.raises(th.RecipeError, match=r"(?s)a dict with 'input_ids', 'attention_mask'.*embeddings"):
            recipe(model(), {"input_ids": X, "attention_mask": X}, target=0)


def test_a_module_can_be_given_as_a_point():
    net, x = model(), torch.ones(1, 4)
    by_module = th.recipes.conductance(net, x, target=0, point=net[0])
    by_name = th.recipes.conductance(net, x, target=0, point="0")
    assert torch.equal(by_module.attribution, by_name.attribution)


def test_prompts_of_different_length_are_refused_with_both_shapes():
    for recipe in (th.recipes.patching.activation, th.recipes.patching.attribution):
        with pytest.raises(th.RecipeError, match=r"clean has \[2, 5, 4\], corrupt has \[2, 4, 4\]"):
            recipe(model(), X, X[:, :4], points=["0"], metric=total)


def test_one_thing_is_not_in_the_plural():
    net = model()
    with th.record(net, "0") as tape:
        net(X)
    assert repr(tape).startswith("tape: 1 value, 0 gradients")
