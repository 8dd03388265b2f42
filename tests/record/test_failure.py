"""A model that fails half-way: what was recorded stays, with a note of where it ended."""

import gc

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import live_tensors


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.block = nn.Sequential(nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x, *, scale=1.0):
        return self.block(self._widen(self.first(x)) * scale)

    def _widen(self, x):
        return x


def fails(model, *args, selectors=("**",), **kwargs):
    with pytest.raises(RuntimeError), th.record(model, *selectors) as tape:
        model(*args, **kwargs)
    return tape


def test_the_innermost_module_is_named_with_what_it_was_given():
    tape = fails(Deep(), torch.ones(5, 2))
    assert list(tape) == ["first", "block.0"]
    found = tape.notes["failure"]
    assert (found["address"], found["kind"]) == ("block.1", "Linear")
    assert found["inputs"] == {"input": "float32[5, 3]"}
    assert found["parameters"] == {"weight": "float32[1, 4]", "bias": "float32[1]"}
    assert "shapes cannot be multiplied" in found["message"]
    assert "✗ the run failed in block.1 (Linear)" in repr(tape)


def test_a_failure_between_modules_is_that_of_the_module_whose_code_it_is():
    tape = fails(Deep(), torch.ones(5, 2), scale=torch.ones(7))
    assert tape.notes["failure"]["address"] == ":return"
    assert tape.notes["failure"]["inputs"] == {"x": "float32[5, 2]", "scale": "float32[7]"}


def test_what_was_recorded_inside_a_forward_does_not_hide_the_failure():
    tape = fails(Deep(), torch.ones(5, 2), selectors=["block.*:*", "block:*"])
    assert tape.notes["failure"]["address"] == "block.1"


class Inner(nn.Module):
    def __init__(this):  # noqa: N805  # what these tests are about
        super().__init__()
        this.first = nn.Linear(2, 3)

    def forward(this, x):  # noqa: N805
        return this._split(this.first(x))

    def _split(this, x):  # noqa: N805
        return x.view(7, 7)


class Loose(Inner):
    def forward(*args):
        return args[0].first(args[1]).view(7, 7)


@pytest.mark.parametrize("inner", [Inner, Loose])
def test_the_module_is_found_whatever_its_receiver_is_called(inner):
    found = fails(nn.Sequential(nn.Identity(), inner()), torch.ones(5, 2)).notes["failure"]
    assert (found["address"], found["kind"]) == ("1", inner.__name__)
    assert "test_failure.py" in found["where"]
    assert "this" not in found["inputs"]


def test_an_error_in_a_function_that_takes_the_model_is_not_the_models():
    def evaluate(model):
        with th.record(model, "first") as tape:
            kept.append(tape)
            raise KeyError("mine")

    kept = []
    with pytest.raises(KeyError):
        evaluate(Deep())
    assert "failure" not in kept[0].notes


def test_a_failure_of_the_backward_pass_says_so():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())
    with pytest.raises(RuntimeError), th.record(model, "**", grad=True) as tape:
        model(torch.ones(1, 2)).mul_(2).sum().backward()
    found = tape.notes["failure"]
    assert (found["address"], found["error"]) == ("", "RuntimeError")
    assert found["message"].startswith("in the backward pass: one of the variables")


def test_an_error_of_the_users_own_is_no_failure_of_the_model():
    with pytest.raises(KeyError), th.record(Deep(), "first") as tape:
        raise KeyError("mine")
    assert "failure" not in tape.notes


def test_the_note_is_saved_with_the_tape(tmp_path):
    tape = fails(Deep(), torch.ones(5, 2))
    tape.save(tmp_path / "run.th")
    again = th.load(tmp_path / "run.th")
    assert again.notes == tape.notes
    assert repr(again) == repr(tape)


def test_notes_are_plain_or_are_not_written(tmp_path):
    tape = fails(Deep(), torch.ones(5, 2))
    tape.notes["mine"] = {"loss": [1.5, None], "why": "π"}
    tape.save(tmp_path / "run.th")
    assert th.load(tmp_path / "run.th").notes["mine"] == {"loss": [1.5, None], "why": "π"}
    tape.notes["mine"] = torch.ones(1)
    with pytest.raises(th.TapeFileError, match="cannot be written as JSON"):
        tape.save(tmp_path / "other.th")
    assert not (tmp_path / "other.th").exists()


@pytest.mark.parametrize(
    "notes",
    [
        ["a list"],
        {"failure": "yes"},
        {"failure": {"address": "a"}},
        {
            "failure": {
                "address": 1,
                "kind": "",
                "error": "",
                "message": "",
                "where": "",
                "inputs": {},
                "parameters": {},
            }
        },
        {
            "failure": {
                "address": "",
                "kind": "",
                "error": "",
                "message": "",
                "where": "",
                "inputs": [],
                "parameters": {},
            }
        },
        {
            "failure": {
                "address": "a{",
                "kind": "",
                "error": "",
                "message": "",
                "where": "",
                "inputs": {},
                "parameters": {},
            }
        },
        {"order": "abc"},
        {"tokens": [1]},
        {"model": {"name": "x"}},
    ],
)
def test_notes_that_somebody_made_up_are_malformed(tmp_path, notes):
    tape = fails(Deep(), torch.ones(5, 2))
    tape.notes = notes
    tape.save(tmp_path / "run.th")
    with pytest.raises(th.TapeFileError, match="malformed"):
        th.load(tmp_path / "run.th")


def test_a_failure_keeps_nothing_alive():
    def run():
        fails(Deep(), torch.ones(5, 2))

    run()
    gc.collect()  # The traceback itself is full of cycles, which are not ours.
    before = len(live_tensors())
    run()
    gc.collect()
    assert len(live_tensors()) <= before
