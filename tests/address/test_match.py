import functools
import gc
import re
import weakref

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tenterhook.address import Point, Site, aliases, canonical, resolve, select
from tenterhook.address.walk import walk
from tenterhook.errors import AddressError, SelectorError


@pytest.fixture(scope="module")
def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32))


@pytest.fixture
def mlp():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))


class Twins(nn.Module):
    """One module and one parameter, each under two names."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)
        self.decoder = self.encoder
        self.head.weight = self.encoder[0].weight

    def forward(self, x, *, mask=None):
        return self.head(self.decoder(self.encoder(x)))


def texts(model, *selectors, **options):
    return [str(point) for point in resolve(model, list(selectors), **options)]


# --- the walk ---------------------------------------------------------------------------------------------------------


def test_the_walk_has_the_names_and_the_order_of_named_modules(gpt2):
    assert walk(gpt2)[0] == list(gpt2.named_modules())


def test_the_walk_meets_a_shared_module_once_and_shows_its_further_name():
    model = Twins()
    firsts, others = walk(model)
    assert firsts == list(model.named_modules())
    assert others == [("decoder", model.encoder)]


def test_a_module_that_contains_itself_does_not_keep_the_walk_going():
    model = nn.Module()
    model.inner = nn.Linear(2, 2)
    model.inner.back = model
    assert texts(model, "**") == [":return", "inner"]
    assert texts(model, "**.back.inner") == ["inner"]


# --- literal addresses ------------------------------------------------------------------------------------------------


def test_a_module_is_found_by_its_path(mlp):
    (point,) = resolve(mlp, ["2.0"])
    assert (point.address, point.site, point.path, point.name) == ("2.0", Site.RETURN, "2.0", None)
    assert point.module is mlp[2][0]
    assert point.explicit


def test_a_lone_text_is_one_selector(mlp):
    assert [point.address for point in resolve(mlp, "2.0")] == ["2.0"]


@pytest.mark.parametrize("text", ["", ":return"])
def test_the_root_is_found(mlp, text):
    (point,) = resolve(mlp, [text])
    assert (point.address, point.path, point.module) == (":return", "", mlp)


def test_a_call_number_is_kept_beside_the_address(mlp):
    (point,) = resolve(mlp, ["2.0#-1"])
    assert (point.address, point.call, str(point)) == ("2.0", -1, "2.0#-1")


def test_the_first_argument_and_named_arguments_are_found(gpt2):
    first, named = resolve(gpt2, ["transformer.h.0.attn:in", "transformer.h.0.attn:attention_mask#0"])
    assert (first.site, first.name) == (Site.IN, None)
    assert (named.site, named.name, named.call) == (Site.ARGUMENT, "attention_mask", 0)
    assert named.module is gpt2.transformer.h[0].attn


def test_parameters_and_buffers_are_found(mlp):
    weight, mean = resolve(mlp, ["0.weight", "2.1.running_mean"])
    assert (weight.site, weight.module, weight.path, weight.name) == (Site.PARAMETER, mlp[0], "0", "weight")
    assert weight.tensor is mlp[0].weight
    assert mean.tensor is mlp[2][1].running_mean


def test_a_parameter_of_the_root_is_found():
    model = nn.Linear(2, 2)
    (point,) = resolve(model, ["bias"])
    assert (point.address, point.path, point.module) == ("bias", "", model)


def test_names_with_special_characters_are_found_escaped():
    model = nn.ModuleDict({"a:b#{*}": nn.Linear(2, 2)})
    (point,) = resolve(model, ["*"])
    assert point.address == "a\\:b\\#\\{\\*\\}"
    assert point.path == "a:b#{*}"
    assert resolve(model, [point.address]) == (point,)
    assert texts(model, "*.weight", "*:in") == [f"{point.address}.weight", f"{point.address}:in"]


@pytest.mark.parametrize("text", ["0.weight#1", "0.weight:in"])
def test_a_parameter_is_never_called(mlp, text):
    with pytest.raises(AddressError, match=r"which has no calls and no inner names.\nWrite '0.weight'"):
        resolve(mlp, [text])


def test_a_literal_address_does_not_walk_the_model(mlp, monkeypatch):
    monkeypatch.setitem(resolve.__globals__, "walk", lambda _: pytest.fail("walked"))
    resolve(mlp, ["2.0", "2.0:in", "2.0.weight"])


# --- inside forward ---------------------------------------------------------------------------------------------------


def test_a_name_that_is_no_argument_is_answered_with_the_arguments(mlp):
    with pytest.raises(AddressError) as caught:
        resolve(mlp, ["0:inputs"])
    said = str(caught.value)
    assert "Linear.forward has nothing with the name 'inputs'" in said
    assert "Its arguments: input;" in said
    assert "Did you mean input?" in said


@pytest.mark.parametrize("text", ["0:relu()", "0:x[1]", "0:f():x", "**:softmax()", "0:return[1]"])
def test_a_place_that_is_not_inside_forward_is_reported(mlp, text):
    with pytest.raises(AddressError, match=r"Linear\.forward has nothing with the name|has this name in its forward"):
        resolve(mlp, [text])


def halve(x):
    y = x / 2
    half = y
    return half


def test_a_name_of_the_forward_itself_is_not_looked_for_in_what_it_calls_where_any_keyword_is_taken():
    class Open(nn.Module):
        def forward(self, x, **kwargs):
            y = halve(x)
            return y + len(kwargs)

    found = [[point.address for point in resolve(nn.Sequential(Open()), f"0:{name}")] for name in ("y", "half", "z")]
    assert found == [["0:y"], ["0:halve():half"], ["0:z"]]


def test_a_forward_with_open_keywords_takes_any_name():
    class Open(nn.Module):
        def forward(self, x, **kwargs):
            return x

    (point,) = resolve(Open(), [":anything"])
    assert (point.site, point.name) == (Site.ARGUMENT, "anything")


def test_a_forward_without_arguments_has_no_first_one():
    class Source(nn.Module):
        def forward(self):
            return torch.zeros(1)

    with pytest.raises(AddressError, match="takes no argument"):
        resolve(Source(), [":in"])


def test_a_container_that_cannot_be_called_has_no_first_argument():
    with pytest.raises(AddressError, match="takes no argument"):
        resolve(nn.ModuleDict({"h": nn.ModuleList()}), ["h:in"])


def test_a_decorated_forward_has_the_arguments_of_the_one_it_wraps():
    def loud(forward):
        @functools.wraps(forward)
        def inner(*args, **kwargs):
            return forward(*args, **kwargs)

        return inner

    class Loud(nn.Module):
        @loud
        def forward(self, x, mask):
            return x

    assert texts(Loud(), ":*") == [":x", ":mask", ":return"]


def test_an_instances_own_forward_is_the_one_that_counts():
    model = nn.Linear(2, 2)
    model.forward = lambda left, right: left
    assert texts(model, ":*") == [":left", ":right", ":return"]


def test_reading_an_instances_own_forward_does_not_keep_the_module():
    model = nn.Linear(2, 2)
    model.forward = functools.partial(type(model).forward, model)
    resolve(model, [":input"])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_star_after_the_colon_is_every_argument_every_place_inside_and_the_output(mlp):
    points = resolve(mlp, ["0:*"])
    assert [point.address for point in points] == ["0:input", "0:linear()", "0"]
    assert not any(point.explicit for point in points)


def test_in_can_be_one_of_several_alternatives(mlp):
    assert texts(mlp, "0:{in,return}") == ["0:in", "0"]


def test_a_glob_finds_the_modules_whose_forward_spells_the_argument_out(gpt2):
    assert texts(gpt2, "**.attn:attention_mask") == [f"transformer.h.{i}.attn:attention_mask" for i in range(2)]


def test_a_glob_for_the_first_argument_passes_over_containers(gpt2):
    found = texts(gpt2, "transformer.**:in")
    assert "transformer.h:in" not in found
    assert "transformer.h.0.mlp:in" in found


def test_a_glob_for_an_argument_that_no_one_takes_names_those_that_are(mlp):
    with pytest.raises(AddressError, match=r"none of the 6 modules has this name.*\nTheir arguments include inp"):
        resolve(mlp, ["**:inputt"])


# --- globs ------------------------------------------------------------------------------------------------------------


def test_two_stars_are_every_module_the_root_included(gpt2):
    points = resolve(gpt2, ["**"])
    assert [point.path for point in points] == [name for name, _ in gpt2.named_modules()]
    assert [point.address for point in points][:2] == [":return", "transformer"]
    assert not any(point.explicit for point in points)


def test_one_star_is_one_segment_and_never_the_root(mlp):
    assert texts(mlp, "*") == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("glob", "found"),
    [
        ("transformer.h.*", ["transformer.h.0", "transformer.h.1"]),
        ("transformer.h.{0..5}.attn", ["transformer.h.0.attn", "transformer.h.1.attn"]),
        (
            "**.1.**.c_{fc,proj}",
            ["transformer.h.1.attn.c_proj", "transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.c_proj"],
        ),
        ("transformer.w*", ["transformer.wte", "transformer.wpe"]),
        ("**.ln_f.**", ["transformer.ln_f"]),
    ],
)
def test_globs(gpt2, glob, found):
    assert texts(gpt2, glob) == found


def test_a_question_mark_is_a_character_like_any_other():
    assert texts(nn.ModuleDict({"a?": nn.ReLU(), "ab": nn.ReLU()}), "a?") == ["a?"]


def test_a_glob_keeps_the_call_number(mlp):
    assert texts(mlp, "{0,1}#2") == ["0#2", "1#2"]


def test_a_glob_means_parameters_where_it_spells_out_a_part_of_their_name(mlp):
    assert texts(mlp, "**.{weight,bias}") == ["0.weight", "0.bias", "2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"]
    assert texts(mlp, "2.1.running_*") == ["2.1.running_mean", "2.1.running_var"]


def test_a_glob_that_ends_in_a_star_does_not_mean_parameters(mlp):
    assert texts(mlp, "2.*") == ["2.0", "2.1"]


# --- other selectors --------------------------------------------------------------------------------------------------


def test_a_module_object_is_found_and_counts_as_named(mlp):
    (point,) = resolve(mlp, [mlp[2][0]])
    assert (point.address, point.explicit) == ("2.0", True)


def test_a_class_finds_its_modules_and_those_of_its_subclasses(mlp):
    assert texts(mlp, nn.Linear) == ["0", "2.0"]
    assert texts(mlp, nn.modules.batchnorm._BatchNorm) == ["2.1"]


def test_a_regex_searches_the_dotted_name(gpt2):
    assert texts(gpt2, re.compile(r"h\.\d+$")) == ["transformer.h.0", "transformer.h.1"]


def test_a_predicate_sees_name_and_module(mlp):
    assert texts(mlp, lambda name, module: name.startswith("2") and isinstance(module, nn.Linear)) == ["2.0"]


def test_lists_sets_points_and_selections_can_be_nested(mlp):
    (point,) = resolve(mlp, ["1"])
    assert texts(mlp, [("2.0", {"2.1", "0"}), point], select(mlp, nn.ReLU)) == ["2.0", "0", "2.1", "1"]


def test_the_default_site_is_for_selectors_that_name_modules_only(mlp):
    assert texts(mlp, nn.Linear, mlp[1], "0", default_site=Site.IN) == ["0:in", "2.0:in", "1:in", "0"]


def test_no_selectors_are_no_points(mlp):
    assert resolve(mlp, []) == ()


@pytest.mark.parametrize("wrong", [3, None, int, b"h", re.compile(b"h"), {"h": 1}])
def test_what_cannot_select_is_named_with_what_can(mlp, wrong):
    with pytest.raises(SelectorError, match="A selector is an address"):
        resolve(mlp, [wrong])


@pytest.mark.parametrize(("wrong", "said"), [(len, "a builtin"), (nn.Linear, "the class Linear"), ({}, "a dict")])
def test_what_is_no_model_is_reported_to_be_none(wrong, said):
    with pytest.raises(SelectorError, match=f"must be an nn.Module; got {said}"):
        resolve(wrong, ["h"])


def test_a_method_of_a_model_is_answered_with_the_model(mlp):
    with pytest.raises(SelectorError, match="the model, not its method"):
        resolve(mlp.forward, ["0"])


def test_a_module_of_another_model_is_refused(mlp):
    with pytest.raises(AddressError, match="The Linear given as a selector is not part of this Sequential"):
        resolve(mlp, [nn.Linear(2, 2)])


def test_a_point_of_another_model_is_refused_with_its_address(mlp):
    (point,) = resolve(nn.Sequential(nn.Linear(2, 2)), ["0"])
    with pytest.raises(AddressError, match="Select it by its address, '0'"):
        resolve(mlp, [point])


@pytest.mark.parametrize("selector", [nn.Conv2d, re.compile("zzz"), lambda name, module: False, "zz*", "*.zz"])
def test_a_selector_that_finds_nothing_is_an_error(mlp, selector):
    with pytest.raises(AddressError, match=r"Sequential has no"):
        resolve(mlp, [selector])


# --- once each, and shared --------------------------------------------------------------------------------------------


def test_a_point_found_twice_is_there_once_and_counts_as_named(mlp):
    points = resolve(mlp, ["*", "1"])
    assert [(point.address, point.explicit) for point in points] == [("0", False), ("1", True), ("2", False)]


def test_calls_of_one_module_are_different_points(mlp):
    assert texts(mlp, "0", "0#1", "0#1", "0:in") == ["0", "0#1", "0:in"]


def test_a_shared_module_is_one_point_and_each_name_finds_it():
    model = Twins()
    assert texts(model, "encoder", "decoder") == ["encoder"]
    assert texts(model, "decoder") == ["decoder"]
    assert texts(model, "deco*") == ["encoder"]
    assert texts(model, "decoder.*") == ["encoder.0"]
    assert texts(model, re.compile("^decoder")) == ["encoder", "encoder.0"]


def test_a_further_name_gives_way_to_the_first_once_that_is_known():
    points = resolve(Twins(), ["decoder", "**"])
    assert [(point.address, point.explicit) for point in points][:2] == [("encoder", True), (":return", False)]


def test_a_tied_parameter_is_one_point_and_each_name_finds_it():
    model = Twins()
    assert texts(model, "**.weight") == ["encoder.0.weight"]
    assert texts(model, "head.w*") == ["encoder.0.weight"]
    assert texts(model, "head.weight", "encoder.0.weight") == ["head.weight"]


def test_the_tied_weight_of_gpt2_is_found_under_its_first_name(gpt2):
    (point,) = canonical(gpt2, resolve(gpt2, ["lm_head.weight"]))
    assert (point.address, point.module) == ("transformer.wte.weight", gpt2.transformer.wte)


def test_aliases_are_all_names_the_first_one_first():
    model = Twins()
    names = {text: aliases(model, *resolve(model, [text])) for text in ("decoder.0:in", "head.weight", ":mask", "head")}
    assert names == {
        "decoder.0:in": ("encoder.0:in", "decoder.0:in"),
        "head.weight": ("encoder.0.weight", "head.weight", "decoder.0.weight"),
        ":mask": (":mask",),
        "head": ("head",),
    }


def test_points_are_equal_by_address_and_call(mlp):
    other = nn.Sequential(nn.Linear(5, 5))
    (left,), (right,), (call,) = resolve(mlp, ["0"]), resolve(other, [other[0]]), resolve(mlp, ["0#0"])
    assert left == right
    assert hash(left) == hash(right)
    assert left != call
    assert isinstance(left, Point)
    assert left != "0"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch deprecates scripting, and scripted models live on
def test_a_scripted_model_can_be_addressed(mlp):
    scripted = torch.jit.trace_module(mlp.eval(), {"forward": torch.zeros(1, 2)})
    assert texts(scripted, "2.0", "2.0.weight") == ["2.0", "2.0.weight"]
