"""Two watches side by side: which point departs first, and when."""

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook import departures
from tenterhook.report import watch_comparison
from tenterhook.report.watch_comparison import runs_page


def run(path, *, step=None, layer=2, steps=8):
    """Train, and change the weights of one layer before one step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with th.watch(model, optimizer=optimizer, sinks=[th.JsonLines(path)]) as watch:
        for number in range(steps):
            if number == step:
                model[layer].weight.data *= 1.3
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    return watch


@pytest.mark.parametrize(("step", "layer"), [(3, 2), (5, 0), (7, 3)])
def test_the_first_departure_is_the_layer_that_was_changed(step, layer, tmp_path):
    run(tmp_path / "a")
    run(tmp_path / "b", step=step, layer=layer)
    first, *others = departures(tmp_path / "a", tmp_path / "b")
    assert (first.kind, first.address, first.step) == ("values", str(layer), step)
    assert all(each.step >= step for each in others)


def test_a_change_of_the_loss_shows_first_in_the_gradient_of_the_last_layer(tmp_path):
    plain = run(tmp_path / "a")
    lines = th.JsonLines.read(tmp_path / "a")
    for row in lines[4]["rows"]["gradients"].values():
        row["norm"] *= 2
    assert departures(plain, lines)[0].address in {"3", ":return", "3.weight", "3.bias"}
    assert departures(plain, lines)[0].kind == "gradients"


def test_equal_runs_do_not_depart_and_watches_and_logs_are_the_same(tmp_path):
    one, other = run(tmp_path / "a"), run(tmp_path / "b")
    assert departures(one, other) == departures(tmp_path / "a", other) == []
    assert "No norm differs" in runs_page({"a": one, "b": other}).remarks[0]["text"]


def test_three_runs_are_an_error_that_says_how_many_there_are(tmp_path):
    one = run(tmp_path / "a")
    with pytest.raises(TypeError, match=r"a dict of two by name: .*; got a dict of 3: Watch, Watch, .*Path"):
        th.page(tmp_path / "page.html", {"a": one, "b": one, "c": tmp_path / "a"})


def test_the_page_says_where_and_draws_the_earliest(tmp_path):
    one, _ = run(tmp_path / "a"), run(tmp_path / "b", step=3)
    page = runs_page({"plain": one, "changed": tmp_path / "b"})
    assert page.remarks[0]["text"].startswith("The runs first depart at the values of '2', in step 3")
    assert page.charts[0].title == "norm of the values of 2"
    assert set(page.charts[0].series) == {"plain", "changed"}
    assert page.tables[0].rows[0].cells[:3] == ("3", "values", "2")
    assert th.page(tmp_path / "runs.html", {"plain": one, "changed": str(tmp_path / "b")}) > 10_000


def test_a_damaged_log_is_an_error(tmp_path):
    (tmp_path / "a").write_text("no log\n")
    with pytest.raises(th.TapeFileError, match="damaged at line 1"):
        departures(tmp_path / "a", tmp_path / "a")


def test_the_earlier_place_of_the_function_still_has_it():
    assert watch_comparison.departures is departures
