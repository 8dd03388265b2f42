import pytest
from torch import nn

from tenterhook.address import resolve
from tenterhook.address.suggest import listed, nearest
from tenterhook.errors import AddressError

NAMES = ["conv1", "layer1.0.conv1", "layer1.0.conv2", "layer4.1.bn2", "fc", "fc.weight"]


def test_a_slip_of_the_finger_finds_the_whole_name():
    assert nearest("layer1.0.cnv2", NAMES)[0] == "layer1.0.conv2"


def test_the_end_of_a_path_finds_the_path():
    assert nearest("conv2", NAMES)[0] == "layer1.0.conv2"


def test_the_exact_end_comes_before_a_similar_whole_name():
    assert nearest("conv2", NAMES).index("layer1.0.conv2") < nearest("conv2", NAMES).index("conv1")


def test_equally_near_names_stay_in_the_order_of_the_model():
    assert nearest("attn", ["h.0.attn", "h.1.attn", "h.2.attn"], limit=2) == ["h.0.attn", "h.1.attn"]


def test_nothing_is_suggested_where_nothing_is_near():
    assert nearest("zzz", NAMES) == []


def test_at_most_five_names_are_suggested():
    assert len(nearest("h.99", [f"h.{index}" for index in range(50)])) == 5


def test_a_long_list_ends_with_the_number_of_the_rest():
    assert listed([str(index) for index in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


@pytest.fixture
def model():
    return nn.ModuleDict({"h": nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(2, 2, bias=False)}) for _ in range(3))})


def message(model, selector):
    with pytest.raises(AddressError) as caught:
        resolve(model, [selector])
    return str(caught.value)


def test_an_unknown_name_says_how_far_the_path_was_right(model):
    said = message(model, "h.1.atn.weight")
    assert "ModuleDict has no 'h.1.atn.weight': 'h.1' (ModuleDict) has no 'atn'." in said
    assert "Did you mean h.1.attn.weight" in said


def test_an_unknown_first_name_is_looked_for_further_down(model):
    assert "Did you mean h.0.attn, h.1.attn, h.2.attn" in message(model, "attn")


def test_a_parameter_that_is_none_is_reported_to_be_none(model):
    assert "'h.0.attn' (Linear) has 'bias', which is None" in message(model, "h.0.attn.bias")


def test_a_parameter_has_nothing_below_it(model):
    assert "'h.0.attn' (Linear) has no 'weight' module" in message(model, "h.0.attn.weight.data")


def test_a_glob_that_would_match_further_down_is_reported(model):
    assert "'**.attn.*' matches" not in message(model, "attn.*")
    assert "'**.{0..2}.attn' matches 3 modules" in message(model, "{0..2}.attn")


def test_a_class_that_is_absent_is_answered_with_the_classes_that_are_there(model):
    assert "Linear (3×)" in message(model, nn.Conv2d)


def test_suggested_names_are_escaped():
    model = nn.ModuleDict({"a:bcdef": nn.Identity()})
    assert "Did you mean a\\:bcdef?" in message(model, "abcdef")
