"""Figures and cards of single values."""

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook._look.card import Card
from tenterhook._look.figure import figure


@pytest.fixture
def tape():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    with th.record(model, "**", "0.weight", grad=True) as tape:
        model(torch.randn(1, 1, 4, 4)).sum().backward()
    return tape


def images(figure):
    return [image for box in figure.subfigs for axes in box.axes for image in axes.get_images()]


def test_a_figure_shows_maps_of_the_value_and_of_its_gradient(tape, tmp_path):
    figure = tape.plot("0")
    value, gradient = images(figure)
    drawn = np.ma.filled(value.get_array(), np.nan)
    assert np.array_equal(drawn[:2, :2], tape["0"][0, 0].numpy())
    assert gradient.get_clim()[0] == -gradient.get_clim()[1]
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5_000


def test_a_vector_is_a_line_and_its_histogram_counts_every_value(tape):
    figure = tape.plot("2")
    (line,) = figure.subfigs[0].axes[0].get_lines()
    assert np.array_equal(line.get_ydata(), tape["2"][0].numpy())
    assert sum(bar.get_height() for bar in figure.subfigs[1].axes[0].patches) == 3


def test_a_parameter_and_a_number_can_be_drawn(tape):
    assert len(images(tape.plot("0.weight"))) == 2
    model = nn.MSELoss()
    with th.record(model) as loss:
        model(torch.ones(2), torch.zeros(2))
    assert loss.plot(":return").subfigs[0].texts[-1].get_text() == "1"


def test_pyplot_is_left_alone(tape):
    import sys

    tape.plot("0")
    assert "matplotlib.pyplot" not in sys.modules


def test_a_value_draws_itself_as_text_and_in_a_notebook(tape):
    card = tape.look("0")
    assert isinstance(card, Card)
    assert repr(card).splitlines()[1].split()[:3] == ["0", "Conv2d", "1×4×2×2"]
    drawn = card._repr_html_()
    assert "1×4×2×2" in drawn
    assert 'src="data:image/png;base64,' in drawn


def test_an_unknown_address_is_reported_at_once(tape):
    with pytest.raises(th.NotRecorded, match="Did you mean"):
        tape.look("0.weigt")


def test_without_matplotlib_there_is_the_table_and_how_to_get_the_rest(tape, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "tenterhook\[page\]"'):
        tape.plot("0")
    drawn = tape.look("0")._repr_html_()
    assert "1×4×2×2" in drawn
    assert "tenterhook[page]" in drawn


def test_a_constant_has_a_narrow_bar_where_it_is():
    for value in (1.0, -1e-10, 0.0):
        axes = figure([("v", torch.full((4, 5), value))]).subfigs[1].axes[0]
        (bar,) = axes.patches
        assert bar.get_x() + bar.get_width() / 2 == pytest.approx(value)
        low, high = axes.get_xlim()
        assert low < bar.get_x() < bar.get_x() + bar.get_width() < high
        assert bar.get_width() < (high - low) / 5


def test_what_is_not_finite_is_reported_and_not_drawn_as_a_blank():
    left = figure([("v", torch.full((4, 5), torch.inf))]).subfigs[0]
    assert [text.get_text() for text in left.texts if text.get_text() != "v"] == ["nothing finite to draw"]
