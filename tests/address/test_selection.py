import io
import subprocess
import sys

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tenterhook.address import Selection, resolve, select
from tenterhook.address.tree import SeenValue
from tenterhook.errors import SelectorError


@pytest.fixture
def mlp():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


@pytest.fixture
def deep():
    block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return nn.ModuleDict(
        {"stem": nn.Linear(2, 2), "h": nn.ModuleList(block() for _ in range(4)), "norm": nn.LayerNorm(2)}
    )


@pytest.fixture(scope="module")
def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32))


# --- a value ----------------------------------------------------------------------------------------------------------


def test_without_selectors_every_module_is_selected(mlp):
    assert select(mlp).addresses == (":return", "0", "1", "2")


def test_it_is_a_sequence_of_points(mlp):
    chosen = select(mlp, "2", "0:in", "1#3")
    assert len(chosen) == 3
    assert [str(point) for point in chosen] == ["2", "0:in", "1#3"]
    assert chosen[0].module is mlp[2]
    assert chosen[-2:] == select(mlp, "0:in", "1#3")
    assert chosen.model is mlp


def test_its_addresses_select_it_again(mlp):
    chosen = select(mlp, "2#1", "*.weight", "1:in", ":return")
    assert select(mlp, *chosen.addresses) == chosen


def test_membership_is_by_address_or_point(mlp):
    chosen = select(mlp, nn.Linear)
    assert "0" in chosen
    assert "0:return" in chosen
    assert resolve(mlp, ["2"])[0] in chosen
    assert "1" not in chosen
    assert "0#1" not in chosen
    assert "nowhere" not in chosen
    assert "h..3" not in chosen
    assert "*" not in chosen
    assert 0 not in chosen


def test_set_algebra(mlp):
    linear, first = select(mlp, nn.Linear), select(mlp, "{0,1}")
    assert (linear | first).addresses == ("0", "2", "1")
    assert (linear & first).addresses == ("0",)
    assert (linear - first).addresses == ("2",)
    assert len(linear - linear) == 0


def test_equality_ignores_the_order_and_needs_the_same_model(mlp):
    assert select(mlp, "0", "1") == select(mlp, "1", "0")
    assert hash(select(mlp, "0", "1")) == hash(select(mlp, "1", "0"))
    assert select(mlp, "0") != select(mlp, "1")
    assert select(mlp, "0") != select(nn.Sequential(nn.ReLU()), "0")
    assert select(mlp, "0") != ("0",)


def test_selections_of_two_models_do_not_mix(mlp):
    with pytest.raises(SelectorError, match="belong to two models"):
        select(mlp) | select(nn.Linear(1, 1))


def test_a_selection_combines_with_selections_only(mlp):
    with pytest.raises(SelectorError, match="got a str"):
        select(mlp) - "0"


def test_every_name_of_a_shared_module_is_the_same_selection():
    model = nn.Module()
    model.encoder = model.decoder = nn.Linear(2, 2)
    assert select(model, "decoder") == select(model, "encoder")
    assert "decoder" in select(model, "encoder")
    assert select(model, "encoder", "decoder").addresses == ("encoder",)
    assert select(model, "decoder")[0].explicit


# --- a drawing --------------------------------------------------------------------------------------------------------


def tree(model, *selectors, **options):
    return str(select(model, *selectors, **options)).split("\n")


def test_the_whole_tree_with_equal_siblings_folded(deep):
    assert tree(deep) == [
        "ModuleDict: 16 modules, 34 parameters, 16 points",
        "name         type                    params",
        ":return      ModuleDict                  34",
        "├─ stem      Linear                       6",
        "├─ h         ModuleList                  24",
        "│  ├─ 0      Sequential                   6",
        "│  │  ├─ 0   Linear                       6",
        "│  │  └─ 1   ReLU",
        "│  └─ 1 … 3  3 × Sequential, like 0      18",
        "└─ norm      LayerNorm                    4",
    ]


def test_unfolded_every_module_has_its_line(deep):
    assert len(select(deep).tree(fold=False).split("\n")) == 2 + 16


def names(model, *selectors, **options):
    """The names in the tree, without what is drawn around them."""
    return [row.name for row in select(model, *selectors, **options).rows()]


def test_siblings_of_different_shape_are_not_folded(deep):
    deep["h"][2][0] = nn.Linear(2, 2, bias=False)
    assert names(deep) == [":return", "stem", "h", "0", "0", "1", "1", "2", "0", "1", "3", "0", "1", "norm"]


def test_one_sibling_alone_is_folded_without_a_count(deep):
    del deep["h"][2:]
    assert [row.kind for row in select(deep).rows() if row.name == "1"] == ["ReLU", "Sequential, like 0"]


def test_siblings_selected_differently_are_not_folded(deep):
    assert names(deep, "h.*", "h.1.0") == [":return", "h", "0", "1", "0", "2", "3"]


def test_siblings_selected_alike_are_folded(deep):
    assert names(deep, "h.*") == [":return", "h", "0", "1 … 3"]


def test_siblings_with_gaps_between_their_numbers_are_not_folded(deep):
    assert names(deep, "h.{0,2}.0") == [":return", "h", "0", "0", "2", "0"]


def test_siblings_that_ran_differently_are_not_folded(deep):
    seen = {f"h.{index}": SeenValue(calls=1 + (index == 3), shape="[4, 2]") for index in range(4)}
    assert names(deep, "h.*", seen=seen) == [":return", "h", "0", "1 … 2", "3"]


def test_what_was_seen_adds_columns(mlp):
    lines = tree(mlp, seen={"0": SeenValue(2, "[8, 3]"), ":return": SeenValue(1, "[8, 1]")})
    assert lines[1].split() == ["name", "type", "params", "output", "calls"]
    assert lines[2].split() == [":return", "Sequential", "13", "[8,", "1]", "1"]
    assert lines[3].split()[-3:] == ["[8,", "3]", "2"]


def test_a_part_of_the_model_is_marked_and_shown_with_what_leads_to_it(deep):
    assert tree(deep, "h.2.0:in", "h.2.0.weight", "h.2#5") == [
        "ModuleDict: 16 modules, 34 parameters, 3 points",
        "   name                type              params",
        "   :return             ModuleDict            34",
        "   └─ h                ModuleList            24",
        "      └─ 2             Sequential             6",
        "●        ├─ #5         output",
        "         └─ 0          Linear                 6",
        "●           ├─ :in     first argument",
        "●           └─ weight  parameter [2, 2]       4",
    ]


def test_a_buffer_is_not_counted_as_a_parameter():
    (line,) = [line for line in tree(nn.BatchNorm1d(3), "running_mean") if "running_mean" in line]
    assert line.split() == ["●", "└─", "running_mean", "buffer", "[3]"]


def test_a_shared_module_is_drawn_once_and_named_where_it_comes_again():
    model = nn.Module()
    model.encoder = model.decoder = nn.Linear(2, 2)
    assert tree(model)[-2:] == ["├─ encoder  Linear          6", "└─ decoder  = encoder"]


def test_a_layer_used_many_times_is_folded_to_its_first_name():
    model = nn.Sequential(*[nn.Linear(2, 2)] * 5)
    assert tree(model)[-1].split() == ["└─", "1", "…", "4", "=", "0"]


def test_tied_parameters_are_counted_once_and_named(gpt2):
    lines = tree(gpt2)
    total = sum(parameter.numel() for parameter in gpt2.parameters())
    assert f"{total / 1000:.1f}k parameters" in lines[0]
    assert lines[-1].split() == ["└─", "weight", "=", "transformer.wte.weight"]


def test_it_fits_a_terminal(gpt2):
    assert max(map(len, tree(gpt2, seen={"transformer.h.0": SeenValue(1, "[1, 1024, 768]")}))) <= 100


def test_a_lazy_module_can_be_drawn():
    lines = tree(nn.Sequential(nn.LazyLinear(3)), "0", "0.weight")
    assert "parameter, not yet shaped" in lines[-1]


def test_an_empty_selection_can_be_drawn(mlp):
    assert str(select(mlp, "0") - select(mlp, "0")).startswith("Sequential: 4 modules, 13 parameters, 0 points")


def test_text_rich_and_html_show_the_same_rows(deep):
    from rich.console import Console

    chosen = select(deep, "h.*.0")
    out = io.StringIO()
    Console(width=100, file=out).print(chosen)
    shown = out.getvalue()
    for row in chosen.rows():
        assert row.name in shown
        assert row.kind in shown
        assert row.kind in chosen._repr_html_()
        assert row.kind in repr(chosen)


def test_a_selection_can_be_made_from_points(mlp):
    assert Selection(mlp, resolve(mlp, ["0", "2"])).addresses == ("0", "2")


def test_importing_addresses_does_not_import_rich():
    code = "import sys, torch, tenterhook.address; assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
