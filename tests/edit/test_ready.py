import random

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import untouched

X = torch.linspace(-1, 1, 12).reshape(4, 3)
ROW = torch.tensor([3.0, -2.0, 1.0])
GENERATOR = lambda seed, call: torch.Generator().manual_seed(seed * 1_000_003 + call)


def edited(change, value=X, **options):
    """What becomes of a value at the only point of a model."""
    model = nn.Sequential(nn.Identity())
    with untouched(model), th.edit(model, {"0": change}, **options):
        return model(value)


def projected(value, rows):
    return value @ torch.linalg.pinv(rows) @ rows


CASES = {
    "zero": (th.zero(), torch.zeros_like(X)),
    "set a number": (th.set(2.5), torch.full_like(X, 2.5)),
    "set a tensor": (th.set(X * 3), X * 3),
    "set a row": (th.set(ROW), ROW.expand(4, 3)),
    "add a number": (th.add(1.5), X + 1.5),
    "add a row": (th.add(ROW), X + ROW),
    "add a scaled row": (th.add(ROW, scale=-0.5), X - 0.5 * ROW),
    "scale by a number": (th.scale(-2), X * -2),
    "scale by a row": (th.scale(ROW), X * ROW),
    "clamp": (th.clamp(-0.5, 0.25), X.clamp(-0.5, 0.25)),
    "clamp below": (th.clamp(min=0.0), X.relu()),
    "clamp above": (th.clamp(max=0.0), -(-X).relu()),
    "mean over the batch": (th.mean(), X.mean(0).expand(4, 3)),
    "mean over the last": (th.mean(-1), X.mean(-1, keepdim=True).expand(4, 3)),
    "mean over all": (th.mean((0, 1)), X.mean().expand(4, 3)),
    "noise": (th.noise(0.5, seed=3), X + torch.randn(4, 3, generator=GENERATOR(3, 0)) * 0.5),
    "project": (th.project(ROW), X @ ROW[:, None] @ ROW[None] / ROW.dot(ROW)),
    "project away": (th.project(ROW, remove=True), X - X @ ROW[:, None] @ ROW[None] / ROW.dot(ROW)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_ready_edit_does_what_one_would_write_by_hand(name):
    change, expected = CASES[name]
    assert torch.allclose(edited(change), expected, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_no_ready_edit_changes_what_it_was_given_or_shares_memory_with_it(name):
    change, _ = CASES[name]
    value, row = X.clone(), ROW.clone()
    found = edited(change, value)
    found.mul_(0)
    assert torch.equal(value, X)
    assert torch.equal(ROW, row)


@pytest.mark.parametrize("name", CASES)
def test_what_follows_a_ready_edit_may_change_its_result_in_place(name):
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    change, expected = CASES[name]
    with th.edit(model, {"0": change}):
        assert torch.allclose(model(X.clone()), expected.relu(), atol=1e-6)
    if isinstance(change, th.set) and isinstance(change.value, torch.Tensor):
        assert change.value.min() < 0


def test_directions_that_are_no_unit_vectors_and_not_orthogonal_are_a_span():
    rows = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 3.0]])
    assert torch.allclose(edited(th.project(rows)), projected(X, rows), atol=1e-6)


# --- at= --------------------------------------------------------------------------------------------------------------

INDICES = {
    "row": th.at[1],
    "column": th.at[:, -1],
    "slice": th.at[1:3, :2],
    "ellipsis": th.at[..., 0],
    "mask": X > 0,
    "list": th.at[[0, 2]],
    "tensor": th.at[torch.tensor([0, 3]), torch.tensor([1, 2])],
    "numpy": np.array([True, False, True, False]),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("change", [th.zero, lambda at: th.add(5.0, at=at), lambda at: th.scale(2.0, at=at)])
def test_an_index_restricts_an_edit_to_a_part(name, change):
    at = INDICES[name]
    expected = X.clone()
    made = change(at=at)
    expected[at] = {"zero": lambda v: v * 0, "add": lambda v: v + 5, "scale": lambda v: v * 2}[
        type(made).__name__.lower()
    ](expected[at])
    assert torch.equal(edited(made), expected)


def test_a_tensor_is_set_at_an_index_by_the_shape_of_that_part():
    expected = X.clone()
    expected[:, -1] = torch.arange(4.0)
    assert torch.equal(edited(th.set(torch.arange(4.0), at=th.at[:, -1])), expected)


CUTS = [
    th.at[:, 1], th.at[..., -1], th.at[0], th.at[1:, :, 0], th.at[:, [2, 0]], th.at[None, :, 1], th.at[:, :, ::2],
    th.at[torch.tensor([1, 0, 1])], th.at[:, torch.tensor([True, False, True])],
]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_a_tensor_of_the_whole_shape_is_indexed_as_the_value_is(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    index = draw.choice(CUTS)
    value, whole = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    make, by_hand = draw.choice([
        (th.set, lambda _, new: new), (th.add, lambda old, new: old + new), (th.scale, lambda old, new: old * new)
    ])  # fmt: skip
    truth = value.clone()
    truth[index] = by_hand(value[index], whole[index])
    with th.edit(model := nn.Identity(), {":return": make(whole, at=index)}):
        assert torch.equal(model(value), truth)


def test_a_tensor_that_has_the_shape_of_part_and_whole_is_taken_for_the_part():
    value, new = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    with th.edit(model := nn.Identity(), {":return": th.set(new, at=th.at[[2, 1, 0]])}):
        assert model(value).tolist() == [3, 2, 1]


def test_the_gradient_passes_where_the_edit_does_not_act():
    value = X.clone().requires_grad_()
    edited(th.zero(at=th.at[:, 0]), value).sum().backward()
    expected = torch.ones_like(X)
    expected[:, 0] = 0
    assert torch.equal(value.grad, expected)


def test_an_index_that_does_not_fit_names_the_point_and_the_shape():
    with pytest.raises(th.EditError, match=r"'0'.*at=.*float32\[4, 3\]"):
        edited(th.zero(at=th.at[:, 7]))
    with pytest.raises(th.EditError, match="'0'"):
        edited(th.zero(at=th.at[0, 0, 0]))


def test_a_tensor_that_does_not_fit_the_part_names_the_part():
    text = r"the part th.at\[:, 1\] of the value at '0' is float32\[4\]; th.set got float32\[9, 3\].*\nWith at="
    with pytest.raises(th.EditError, match=text):
        edited(th.set(torch.ones(9, 3), at=th.at[:, 1]))


# --- part= and structures ---------------------------------------------------------------------------------------------


def test_a_structure_with_one_tensor_needs_no_part():
    found = edited(th.zero(), (X, None, {"text": "x"}))
    assert torch.equal(found[0], torch.zeros_like(X))
    assert found[1:] == (None, {"text": "x"})


def test_a_part_chooses_the_tensor():
    value = {"a": X, "b": (X, None, X)}
    found = edited(th.zero(part=("b", 2)), value)
    assert found["a"] is X
    assert found["b"][0] is X
    assert torch.equal(found["b"][2], torch.zeros_like(X))
    assert torch.equal(value["b"][2], X)


def test_a_part_that_is_one_step_away_needs_no_tuple():
    assert torch.equal(edited(th.scale(2, part="a"), {"a": X, "b": X})["a"], X * 2)
    assert torch.equal(edited(th.scale(2, part=1), (X, X))[1], X * 2)


def test_several_tensors_without_a_choice_are_listed():
    with pytest.raises(th.EditError) as caught:
        edited(th.zero(), {"a": X, "b": (X,)})
    assert "part='a', part=('b', 0)" in str(caught.value)


def test_a_part_that_does_not_exist_lists_those_that_do():
    with pytest.raises(th.EditError, match="Say which: part=0, part=1"):
        edited(th.zero(part=5), (X, X))


def test_a_part_of_a_lone_tensor_is_one_too_many():
    with pytest.raises(th.EditError, match="leave out part="):
        edited(th.zero(part=0))


def test_a_value_without_a_tensor_is_reported():
    with pytest.raises(th.EditError, match="There is no tensor in it"):
        edited(th.zero(), (None, 3))


def test_a_whole_structure_can_be_set():
    found = edited(th.set((X * 2, {"b": ROW})), (X, {"b": X}))
    assert torch.equal(found[0], X * 2)
    assert torch.equal(found[1]["b"], ROW.expand(4, 3))


@pytest.mark.parametrize("new", [(1, 2), (X,), {"a": X}])
def test_a_structure_that_is_built_otherwise_is_refused(new):
    with pytest.raises(th.EditError, match="another structure"):
        edited(th.set(new), (X, X))


def test_setting_a_structure_where_there_is_no_tensor_is_not_passed_over():
    with pytest.raises(th.EditError, match="'0' is None"):
        edited(th.set((1, 2)), None)


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [th.set, th.add, th.scale])
def test_a_shape_that_does_not_broadcast_is_refused_with_both_shapes(make):
    with pytest.raises(th.EditError, match=r"'0' is float32\[4, 3\].*float32\[5\].*does not broadcast"):
        edited(make(torch.ones(5)))


@pytest.mark.parametrize("make", [th.set, th.add, th.scale])
def test_a_shape_that_would_enlarge_the_value_is_refused(make):
    with pytest.raises(th.EditError, match="does not broadcast"):
        edited(make(torch.ones(2, 4, 3)))


@pytest.mark.parametrize("make", [th.set, th.add, th.scale, th.project])
def test_another_dtype_is_refused_with_the_conversion(make):
    with pytest.raises(th.EditError, match=r"\.to\(torch\.float32\)"):
        edited(make(torch.ones(3, dtype=torch.float64)))


@pytest.mark.parametrize("make", [th.set, th.add, th.scale])
def test_another_device_is_refused_with_the_move(make):
    with pytest.raises(th.EditError, match=r"meta.*\n.*\.to\('cpu'\)"):
        edited(make(torch.ones(3, device="meta")))


def test_a_direction_of_another_length_is_refused():
    with pytest.raises(th.EditError, match="length 5 instead of 3"):
        edited(th.project(torch.ones(5)))


def test_a_mean_over_a_dimension_that_is_not_there_is_refused():
    with pytest.raises(th.EditError, match="does not fit"):
        edited(th.mean(4))


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_leaves_the_models_random_numbers_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    edited(th.noise())
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_is_the_same_for_a_seed_and_call_and_differs_between_calls():
    model, found = nn.Identity(), []
    with th.edit(model, {":return": th.noise(seed=1)}):
        found = [model(X), model(X)]
    assert torch.equal(edited(th.noise(seed=1)), found[0])
    assert not torch.equal(*found)
    assert not torch.equal(edited(th.noise(seed=2)), found[0])


# --- edits are values -------------------------------------------------------------------------------------------------


def test_ready_edits_are_equal_if_all_that_they_hold_is():
    assert th.scale(2) == th.scale(2)
    assert th.scale(2) != th.scale(3)
    assert th.scale(2) != th.add(2)
    assert th.set(torch.ones(2)) == th.set(torch.ones(2))
    assert th.set(torch.ones(2)) != th.set(torch.ones(3))
    assert th.set(torch.ones(2)) != th.set(torch.ones(2, dtype=torch.float64))
    assert th.zero(at=th.at[:, -1]) == th.zero(at=th.at[:, -1])
    assert th.zero(at=th.at[:, -1]) != th.zero(at=th.at[:, 0])
    assert th.zero(at=torch.tensor([True])) == th.zero(at=torch.tensor([True]))
    assert th.zero() != "zero"


def test_equal_ready_edits_have_equal_hashes():
    assert len({th.scale(2), th.scale(2), th.set(torch.ones(2)), th.set(torch.ones(2))}) == 2


def test_ready_edits_cannot_be_changed():
    with pytest.raises(AttributeError):
        th.scale(2).factor = 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (th.zero(), "th.zero()"),
        (th.set(torch.ones(2, 3)), "th.set(value=float32[2, 3])"),
        (th.scale(2.0, at=th.at[0]), "th.scale(at=0, factor=2.0)"),
        (th.clamp(0, 1), "th.clamp(min=0, max=1)"),
        (th.zero(part="a"), "th.zero(part='a')"),
        (th.zero(at=np.array([True, False])), "th.zero(at=array([ True, False]))"),
        (th.zero(at=torch.ones(2, 2)), "th.zero(at=float32[2, 2])"),
    ],
)
def test_ready_edits_print_as_they_are_written(change, text):
    assert repr(change) == text
