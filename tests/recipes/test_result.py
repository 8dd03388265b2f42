"""Attributions draw themselves."""

import sys

import pytest
import torch
from recipe_models import Tokens, images, reused
from torch import nn

import tenterhook as th

R = th.recipes


def scales(figure):
    """The colour map and limits of each map that is drawn."""
    drawn = [image for axes in figure.axes for image in axes.get_images()]
    return [(each.get_cmap().name, each.norm.vmin, each.norm.vmax) for each in drawn if each.get_cmap().name != "gray"]


def bars(figure):
    """The axes of each scale: they lie inside those of their map, and are as high."""
    return [bar for axes in figure.axes for bar in axes.child_axes]


def test_a_signed_map_is_laid_over_the_image_in_two_colours_around_zero():
    found = R.input_x_gradient(reused(), images(), target=3)
    figure = found.show()
    assert len(figure.axes) == 4  # Image and map for each of two examples, and a scale for each map.
    assert len(bars(figure)) == 2
    for name, low, high in scales(figure):
        assert name == "RdBu_r"
        assert low == -high < 0
    assert figure.axes[0].get_title() == "target 3"


def test_what_cannot_be_negative_goes_from_zero():
    figure = R.gradcam(reused(), images(1), point="conv2").show(title="mine")
    assert [(name, low) for name, low, _ in scales(figure)] == [("inferno", 0.0)]
    assert figure.get_suptitle() == "mine"
    over = figure.axes[1].get_images()[1]
    assert tuple(over.get_extent()) == (-0.5, 7.5, 7.5, -0.5)


def test_tokens_are_a_strip_with_labels():
    torch.manual_seed(0)
    found = R.layer_integrated_gradients(Tokens(), torch.tensor([[1, 2, 3]]), point="embed", target=0, steps=5)
    axes = found.show(labels=["a", "b", "c"]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "c"]
    with pytest.raises(th.RecipeError, match="3 places along the strip, but 1 labels"):
        found.show(labels=["a"])


def test_a_notebook_shows_the_picture_and_the_settings_and_a_file_does_too(tmp_path):
    found = R.integrated_gradients(reused(), images(1), target=3, steps=5)
    shown = found._repr_html_()
    assert "data:image/png;base64," in shown
    assert "steps     5" in shown
    for name in ("map.png", "map.svg", "map.html"):
        assert found.save(tmp_path / name).stat().st_size > 1000
    assert sorted(each.name for each in tmp_path.iterdir()) == ["map.html", "map.png", "map.svg"]
    with pytest.raises(ValueError, match="xyz"):
        found.save(tmp_path / "map.xyz")
    assert len(list(tmp_path.iterdir())) == 3  # Nothing half-written is left.


def test_many_examples_and_volumes_are_kept_within_reason():
    many = R.saliency(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), torch.rand(20, 1, 8, 8), target=0)
    assert len(many.show().axes) == 8 * 2
    assert len(bars(many.show())) == 8
    volume = R.saliency(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), torch.rand(1, 1, 4, 4, 4), target=0)
    with pytest.raises(th.RecipeError, match="choose a part"):
        volume.show()
    assert volume._repr_html_().startswith("<pre>")


def test_several_stand_side_by_side_each_with_its_scale():
    model, x = reused(), images()
    cam = R.gradcam(model, x, point="conv2", target=3)
    found = [R.saliency(model, x, target=3), R.input_x_gradient(model, x, target=3), cam]
    figure = R.side_by_side(found, example=1, columns=2)
    assert [axes.get_title() for axes in figure.axes[:4]] == [
        "target 3", "saliency", "input × gradient", "Grad-CAM at conv2",
    ]  # fmt: skip
    assert len(figure.axes) == 4
    assert len(bars(figure)) == 3
    figure.canvas.draw()
    for axes in figure.axes[1:]:
        (bar,) = axes.child_axes
        assert bar.get_window_extent().height == pytest.approx(axes.get_window_extent().height)
    assert [name for name, *_ in scales(figure)] == ["inferno", "RdBu_r", "inferno"]
    with pytest.raises(th.RecipeError, match="height and width"):
        R.side_by_side([])


def test_side_by_side_each_map_says_what_it_explains_where_that_differs():
    found = [R.saliency(reused(), images(), target=target) for target in (3, 1)]
    titles = [axes.get_title() for axes in R.side_by_side(found).axes]
    assert titles == ["input", "saliency\ntarget 3", "saliency\ntarget 1"]


def test_words():
    found = R.gradcam(reused(), images(1), point="conv2", target=3)
    assert repr(found) == "Grad-CAM at conv2: [1, 8, 8]\n  target    3"
    named = R.saliency(reused(), images(1), target=lambda out: out[:, 0])
    assert "target    <lambda>" in repr(named)


def test_without_matplotlib_the_way_to_get_it_is_reported(monkeypatch):
    found = R.saliency(reused(), images(1), target=3)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"tenterhook\[page\]"):
        found.show()
    assert "saliency" in found._repr_html_()
