import collections.abc
import random
import re

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.record import tape as tape_module
from tenterhook.testing import Cell

X = torch.linspace(-1, 1, 6).reshape(2, 3)
STEPS = torch.linspace(-1, 1, 18).reshape(3, 2, 3)


@pytest.fixture
def tape():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    with th.record(model, "**", "1:in") as tape:
        model(X)
    tape.model = model  # so that it lives as long
    return tape


@pytest.fixture
def steps():
    model = Cell(3)
    with th.record(model, "cell", "cell:in") as tape:
        model(STEPS)
    tape.model = model
    return tape


def test_a_tape_is_a_mapping_over_what_it_holds(tape):
    assert isinstance(tape, collections.abc.Mapping)
    assert list(tape) == [":return", "0", "1", "2", "1:in"]
    assert len(tape) == 5
    assert dict(tape.items())["1:in"] is tape["1:in"]


def test_iteration_gives_addresses_that_each_name_one_value(steps):
    assert list(steps) == ["cell#0", "cell#1", "cell#2", "cell:in#0", "cell:in#1", "cell:in#2"]
    assert all(isinstance(steps[address], torch.Tensor) for address in steps)


def test_several_calls_without_a_choice_are_ambiguous_and_all_of_them_are_listed(steps):
    with pytest.raises(th.AmbiguousCall) as caught:
        steps["cell"]
    assert "called 3 times" in str(caught.value)
    assert "cell#0" in str(caught.value)
    assert ".calls('cell')" in str(caught.value)
    assert isinstance(caught.value, LookupError)


def test_a_call_that_is_not_held_is_reported_with_those_that_are(steps):
    with pytest.raises(th.NotRecorded, match=r"#0.*#1.*#2"):
        steps["cell#3"]
    with pytest.raises(th.NotRecorded):
        steps["cell#-4"]


def test_asking_for_the_calls_of_one_call_is_an_error(steps):
    with pytest.raises(th.AddressError, match="already names one call"):
        steps.calls("cell#1")


def test_a_name_that_is_not_on_the_tape_is_reported_with_the_nearest(tape):
    model = nn.ModuleDict({"encoder": nn.Linear(3, 3), "decoder": nn.Linear(3, 3)})
    model.forward = lambda x: model["decoder"](model["encoder"](x))
    with th.record(model, "encoder") as other:
        model(X)
    with pytest.raises(th.NotRecorded, match="encoder"):
        other["encodr"]
    with pytest.raises(th.NotRecorded, match="decoder"):
        other["decoder"]


def test_what_is_no_text_is_no_address(tape):
    with pytest.raises(th.NotRecorded, match="read by address"):
        tape[0]
    assert 0 not in tape


def test_membership_says_whether_something_can_be_read(tape, steps):
    assert "0" in tape
    assert "0:return" in tape
    assert "0:in" not in tape
    assert "nothing.like.this" not in tape
    assert "not an [address" not in tape
    assert "cell" in steps
    assert "cell#2" in steps
    assert "cell#-1" in steps
    assert "cell#3" not in steps


def test_a_point_that_was_asked_for_and_not_passed_says_so():
    model = nn.Sequential(nn.Linear(3, 3))
    with th.record(model, "*") as tape:
        with pytest.raises(th.NotRecorded, match="it has not run yet"):
            tape["0"]
        assert "0" not in tape
        assert tape.calls("0") == []
        model(X)
        assert "0" in tape


def test_a_tape_can_be_read_while_its_session_is_open():
    model = nn.Sequential(nn.Linear(3, 3))
    with th.record(model, "0") as tape:
        found = model(X)
        assert torch.equal(tape["0"], found)


def test_clearing_forgets_and_recording_goes_on():
    model = nn.Sequential(nn.Linear(3, 3))
    with th.record(model, "0") as tape:
        model(X)
        tape.clear()
        assert len(tape) == 0
        model(X * 2)
    assert list(tape) == ["0#1"]
    assert torch.equal(tape["0"], model[0](X * 2))


def test_the_size_is_that_of_the_tensors(tape):
    assert tape.nbytes == 5 * 6 * 4


def test_the_size_is_known_even_of_what_was_changed():
    model = nn.Sequential(nn.Tanh())
    with torch.no_grad(), th.record(model, "0") as tape:
        model(X).zero_()
    assert tape.nbytes == 24


def test_a_tape_draws_itself(tape):
    text = repr(tape)
    assert "tape: 5 values" in text
    assert "Linear" in text
    assert "<table" in tape._repr_html_()


def test_a_tape_draws_structures_and_whatever_else_is_in_it():
    class Odd(nn.Module):
        def forward(self, x):
            big = torch.full((2,), float("nan"))
            whole = {"ints": torch.arange(3), "empty": torch.zeros(0), "none": None, "sparse": x.to_sparse()}
            return {**whole, "nan": big, "complex": x.to(torch.complex64), "scalar": x.sum(), "bool": x > 0}

    model = Odd()
    with th.record(model) as tape:
        model(X)
    text = repr(tape)
    for name in ("ints", "empty", "sparse", "nan", "complex", "scalar", "bool"):
        assert name in text


def test_a_tape_draws_a_value_without_tensors():
    model = nn.Identity()
    with th.record(model) as tape:
        model(None)
    assert "None" in repr(tape)


def test_a_value_that_was_changed_does_not_keep_the_tape_from_being_drawn():
    model = nn.Sequential(nn.Tanh())
    with torch.no_grad(), th.record(model, "0") as tape:
        model(X).zero_()
    assert "unreadable: ValueChanged" in repr(tape)


def test_an_empty_tape_draws_itself():
    assert "0 values" in repr(th.record(nn.Sequential(nn.Tanh()), "*").tape)


def test_a_long_tape_is_cut_short_when_drawn():
    model = nn.Sequential(nn.Identity())
    with th.record(model, "0") as tape:
        for _ in range(450):
            model(X)
    assert "… and 50 more" in repr(tape)


def test_gradients_that_were_not_asked_for_are_reported(tape):
    with pytest.raises(th.NoBackward, match="grad=True"):
        tape.grad["0"]


def test_a_table_names_finite_values_and_counts_the_others():
    model = nn.Sequential(nn.Identity())
    with th.record(model, "0") as tape:
        model(torch.tensor([1.0, 3.0, torch.nan, torch.inf, torch.inf, 0.0]))
        model(torch.tensor([torch.inf, torch.inf]))
        model(torch.tensor([2, 4]))
    titles = [column.title for column in tape.table().columns]
    cells = [dict(zip(titles, row.cells, strict=True)) for row in tape.table().rows]
    assert (cells[0]["mean"], cells[0]["min"], cells[0]["max"], cells[0]["zeros"]) == ("1.3", "0", "3", "17%")
    assert cells[0]["NaN, Inf"] == "1 NaN, 2 Inf"
    assert (cells[1]["mean"], cells[1]["max"], cells[1]["NaN, Inf"]) == ("–", "–", "2 Inf")
    assert (cells[2]["mean"], cells[2]["NaN, Inf"]) == ("3", "")


def test_a_table_of_finite_values_has_no_column_for_others():
    model = nn.Sequential(nn.Identity())
    with th.record(model, "0") as tape:
        model(torch.ones(3))
    assert "NaN, Inf" not in [column.title for column in tape.table().columns]
    assert {len(row.cells) for row in tape.table().rows} == {len(tape.table().columns)}


@pytest.mark.parametrize(
    "selector", ["*", "**", "{0,1}", nn.Linear, re.compile("0"), lambda name, _: name == "0", "*:in"]
)
@pytest.mark.parametrize("options", [{}, {"grad": True}, {"grad": True, "values": False}])
def test_a_pattern_of_which_nothing_is_reached_is_an_error_that_says_why(selector, options):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with (
        pytest.raises(th.NeverReached, match="was the model called inside the session"),
        th.record(model, selector, **options),
    ):
        pass


def test_each_pattern_has_to_reach_something():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x):
            return self.used(x)

    model = Net()
    with (
        pytest.raises(th.NeverReached, match=r"2 points were never reached:\n  spare.0 and 1 more"),
        th.record(model, "used.*", "spare.*"),
    ):
        model(X)
    with th.record(model, "{used,spare}.*") as tape:
        model(X)
    assert list(tape) == ["used.0"]


def test_a_tape_can_be_asked_by_a_module():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with th.record(model, "**", grad=True) as tape:
        model(X).sum().backward()
    assert torch.equal(tape[model[1]], tape["1"])
    assert torch.equal(tape.grad[model[1]], tape.grad["1"])
    with pytest.raises(th.NotRecorded, match="output of this Linear is not on this tape"):
        tape[nn.Linear(1, 1)]


def test_an_address_that_the_tape_lists_is_read_without_a_search_in_the_model(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with th.record(model) as tape:
        outputs = [model(torch.ones(1, 2) * step) for step in range(3)]

    def search(*_):
        raise AssertionError

    monkeypatch.setattr(tape_module, "resolve", search)
    values = dict(tape.items())
    assert len(values) == 9
    assert all(torch.equal(values[f":return#{call}"], output) for call, output in enumerate(outputs))


@pytest.mark.parametrize("options", [{}, {"grad": True}], ids=["values", "gradients"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_calls_that_raise_do_not_count_among_the_last_ones(keep, compiled, options):
    class Fails(nn.Module):
        def forward(self, x):
            if x.sum() < 0:
                raise ValueError
            return x + 1

    if compiled:
        torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))  # Sessions act differently from here on.
    draw, model, done = random.Random(keep), nn.Sequential(Fails()), []
    with th.record(model, "0", keep="last" if keep == 1 else keep, **options) as tape:
        for number in range(12):
            if draw.random() < 0.4:
                with pytest.raises(ValueError):
                    model(-torch.ones(2, requires_grad=True))
                continue
            done.append(number + 1.0)
            model(torch.full((2,), float(number), requires_grad=True)).sum().backward()
            assert [value[0].item() for value in tape.calls("0")] == done[-keep:]


@pytest.mark.parametrize("others", [(), ("0:in",)])
def test_the_last_call_is_kept_alone_even_after_a_call_that_raised(others):
    class Fails(nn.Module):
        def forward(self, x):
            if x.sum() < 0:
                raise ValueError
            return x + 1

    model = nn.Sequential(Fails())
    with th.record(model, "0", *others, keep="last") as tape:
        model(torch.ones(2))
        with pytest.raises(ValueError):
            model(-torch.ones(2))
        model(torch.ones(2) * 2)
        assert [value.tolist() for value in tape.calls("0")] == [[3, 3]]
        model(torch.ones(2) * 3)
    assert [value.tolist() for value in tape.calls("0")] == [[4, 4]]
    assert "0#3" in tape
