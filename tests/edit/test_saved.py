"""Edits in a file: what goes in comes out, nothing is run, and what cannot be held is said."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import tenterhook as th
from tenterhook.edit import saved as saved_edits
from tenterhook.edit.ready import Edit
from tenterhook.record import tensor_file as files
from tenterhook.record.decode_values import Decoder
from tenterhook.record.encode_values import Encoder

EVERY = {
    "0": th.add(torch.arange(3.0), scale=0.5, at=th.at[:, -1]),
    "1.weight": th.zero(at=th.at[..., 0]),
    "h.*.{attn,mlp}": [th.scale(2), th.clamp(-1.0, None, at=th.at[1:3, None, [0, 2]])],
    "cell#5": th.noise(0.1, seed=7),
    "h.3:attn_weights[2]": th.mean((0, 1), part=("rest", 0)),
    "out": th.project(torch.eye(3)[:2], remove=True, at=...),
    ":return": th.set({"y": torch.ones(2, dtype=torch.bfloat16), "rest": (torch.zeros(1), None)}),
    "masked": th.set(1.5, at=torch.tensor([True, False])),
    "complex": th.scale(2 + 1j),
}


def saved(tmp_path, edits, **kwargs):
    path = tmp_path / "run.edits"
    th.save_edits(path, edits, **kwargs)
    return path


def test_every_ready_edit_comes_back_as_it_was(tmp_path):
    found = th.load_edits(saved(tmp_path, EVERY, notes={"model": "toy", "layers": [1, 2]}))
    assert list(found) == list(EVERY)
    for address, edit in EVERY.items():
        if address != ":return":
            assert found[address] == edit, address
    value = found[":return"].value
    assert value["rest"][1] is None
    assert torch.equal(value["y"], torch.ones(2, dtype=torch.bfloat16))
    assert found.notes == {"model": "toy", "layers": [1, 2]}


def test_loaded_edits_do_what_the_given_ones_did(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    edits = {"0": th.add(torch.randn(3), scale=2.0), "1": [th.scale(3), th.clamp(-1, 1)], "2.bias": th.zero()}
    x = torch.randn(5, 3)
    with th.edit(model, edits):
        wanted = model(x)
    with th.edit(model, th.load_edits(saved(tmp_path, edits))):
        assert torch.equal(model(x), wanted)
    assert not torch.equal(model(x), wanted)


index = st.recursive(
    st.one_of(
        st.integers(-5, 5),
        st.none(),
        st.just(...),
        st.slices(6),
        st.lists(st.integers(0, 3), max_size=3),
        st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=2),
    ),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(at=index, value=st.floats(width=32) | st.integers() | st.complex_numbers(), seed=st.integers(0, 2**70))
def test_any_index_and_any_number_come_back(at, value, seed):
    edits, encoder = [th.set(value, at=at), th.noise(0.5, seed=seed, at=at)], Encoder()
    text = json.dumps([saved_edits._described(edit, "a", encoder) for edit in edits])  # As it stands in a file.
    assert repr(saved_edits._made(json.loads(text), Decoder(encoder.tensors).decode)) == repr(edits)


def test_points_and_selections_are_saved_by_their_addresses(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = th.load_edits(saved(tmp_path, {th.points(model, "*"): th.zero()}))
    assert list(found) == ["0", "1"]
    (point,) = th.points(model, "1:in")
    assert list(th.load_edits(saved(tmp_path, {point: th.zero()}))) == ["1:in"]


def test_a_device_and_a_type_can_be_asked_for(tmp_path):
    path = saved(tmp_path, {"a": th.add(torch.ones(2)), "b": th.set(torch.tensor([1, 2]))})
    found = th.load_edits(path, device="meta", dtype=torch.float16)
    assert found["a"].value.dtype is torch.float16
    assert found["a"].value.is_meta
    assert found["b"].value.dtype is torch.int64


def test_notes_stay_with_edits_that_are_saved_again(tmp_path):
    first = th.load_edits(saved(tmp_path, {"a": th.zero()}, notes={"by": "somebody"}))
    assert th.load_edits(saved(tmp_path, first)).notes == {"by": "somebody"}


class Mine(Edit):
    pass


@pytest.mark.parametrize(
    ("edits", "told"),
    [
        ({"h.5": lambda v: v}, "'h.5' is the function .*<lambda>, which is code.*\n.*ready edits"),
        ({"h.5": [th.zero(), torch.relu]}, "the function .*relu, which is code"),
        ({"h.5": nn.ReLU()}, "the function ReLU, which is code"),
        ({"h.5": Mine()}, "a Mine, an edit of your own"),
        ({"h.5": torch.ones(2)}, "is a Tensor, not a ready edit"),
        ({nn.Linear: th.zero()}, "is an object of this process"),
        ({"h..5": th.zero()}, "is not an address"),
        ({"a": th.add(np.ones(2))}, "value= of the edit add at 'a' has a ndarray"),
        ({"a": th.set((1, [object()]))}, "has a object"),
        ({"a": th.set({"x": ...})}, "has a ellipsis"),
        ({"a": th.zero(at=th.at[np.int64(1) :])}, "at= of the edit zero at 'a' has a int64"),
        ({"a": th.add(torch.ones(2).to_sparse())}, "cannot be saved: .*layout sparse_coo"),
        ([th.zero()], "edits are a dict"),
    ],
)
def test_what_cannot_be_saved_is_reported_and_nothing_is_written(tmp_path, edits, told):
    path = saved(tmp_path, {"old": th.zero()})
    with pytest.raises(th.EditFileError, match=told):
        th.save_edits(path, edits)
    assert list(th.load_edits(path)) == ["old"]
    assert [each.name for each in tmp_path.iterdir()] == ["run.edits"]


def test_notes_that_json_cannot_hold_are_refused(tmp_path):
    with pytest.raises(th.EditFileError, match="notes= cannot be written as JSON"):
        th.save_edits(tmp_path / "a", {"a": th.zero()}, notes={"model": object()})


def test_a_failure_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = saved(tmp_path, {"old": th.zero()})

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "serialize_file", fail)
    with pytest.raises(th.EditFileError, match="nothing was changed: no space left"):
        th.save_edits(path, {"new": th.zero()})
    assert list(th.load_edits(path)) == ["old"]
    assert [each.name for each in tmp_path.iterdir()] == ["run.edits"]


def rewritten(path, **changes):
    with safe_open(path, "pt") as opened:
        texts = opened.metadata() | changes
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    texts["checksum"] = files.checksum(texts, tensors)
    save_file(tensors, path, texts)


def test_a_tape_is_no_set_of_edits_and_neither_is_the_other(tmp_path):
    model = nn.Linear(2, 2)
    with th.record(model) as tape:
        model(torch.ones(1, 2))
    tape.save(tmp_path / "run.th")
    with pytest.raises(th.EditFileError, match="not a set of edits"):
        th.load_edits(tmp_path / "run.th")
    with pytest.raises(th.TapeFileError, match="not a tape"):
        th.load(saved(tmp_path, {"a": th.zero()}))
    with pytest.raises(th.EditFileError, match="there is no file"):
        th.load_edits(tmp_path / "none")
    with pytest.raises(th.EditFileError, match=r"Add a name: .*run\.edits"):
        th.save_edits(tmp_path, {"a": th.zero()})


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path):
    path = saved(tmp_path, {"a": th.add(torch.ones(4))})
    whole = path.read_bytes()
    for place in range(8, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(th.EditFileError):
            th.load_edits(path)
    path.write_bytes(whole[:-3])
    with pytest.raises(th.EditFileError, match="truncated"):
        th.load_edits(path)


def test_a_later_format_says_upgrade(tmp_path):
    path = saved(tmp_path, {"a": th.zero()})
    rewritten(path, format_version="2")
    with pytest.raises(th.EditFileError, match=r"format version 2, .*Upgrade tenterhook"):
        th.load_edits(path)


@pytest.mark.parametrize(
    "edits",
    [
        [["a", [["system", {}]]]],
        [["a", [["zero", {"at": None}]]]],
        [["a", [["zero", {"at": None, "part": None, "value": 1}]]]],
        [["a", [["add", {"at": None, "part": None, "value": 1, "scale": "much"}]]]],
        [["a", [["noise", {"at": None, "part": None, "std": True, "seed": 0}]]]],
        [["a", [["set", {"at": None, "part": None, "value": ["tensor", "t9"]}]]]],
        [["a", [["set", {"at": None, "part": None, "value": ["call", "os:system"]}]]]],
        [["a..b", [["zero", {"at": None, "part": None}]]]],
        [["a"]],
        {"a": 1},
        None,
    ],
)
def test_a_file_that_says_something_else_is_malformed(tmp_path, edits):
    path = saved(tmp_path, {"a": th.zero()})
    rewritten(path, edits=json.dumps({"edits": edits, "views": {}}))
    with pytest.raises(th.EditFileError):
        th.load_edits(path)


def test_a_class_named_in_a_file_is_not_imported(tmp_path):
    value = ["namedtuple", "antigravity:Anything", ["x"], [1]]
    path = saved(tmp_path, {"a": th.zero()})
    text = json.dumps({"edits": [["a", [["set", {"at": None, "part": None, "value": value}]]]], "views": {}})
    rewritten(path, edits=text)
    code = "import sys, tenterhook as th; th.load_edits(sys.argv[1]); print('antigravity' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
