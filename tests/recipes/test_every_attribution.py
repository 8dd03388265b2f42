"""What holds for every attribution: where it works, and the mistakes for which an error says what it needs."""

import functools

import pytest
import torch
from recipe_models import Tokens, images, reused

import tenterhook as th

R = th.recipes
CAMS = {
    name: {"point": "conv2"} for name in ("gradcam", "gradcam_plus_plus", "layercam", "guided_gradcam")
}  # fmt: skip
SLOPES = {
    "saliency": {}, "input_x_gradient": {}, "guided_backprop": {}, "deconvnet": {}, "smoothgrad": {"samples": 2},
    "integrated_gradients": {"steps": 2}, "layer_integrated_gradients": {"point": "conv2", "steps": 2},
    "conductance": {"point": "conv2", "steps": 2}, "deeplift": {}, "lrp": {}, **CAMS,
}  # fmt: skip
SWEEPS = {
    "occlusion": {"window": 4}, "feature_ablation": {"mask": torch.arange(8)}, "channel_ablation": {"point": "conv2"},
    "scorecam": {"point": "conv2"},
}  # fmt: skip


def model_for(name):
    """A model that the recipe can explain, and one example."""
    if name in ("deeplift", "lrp"):
        torch.manual_seed(0)
        layers = [torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5)]
        return torch.nn.Sequential(*layers).double(), images(1)
    return reused(), images(1)


@pytest.mark.parametrize("name", [*SLOPES, *SWEEPS])
def test_it_works_and_a_class_that_is_not_there_is_reported(name):
    model, x = model_for(name)
    options = {**SLOPES, **SWEEPS}[name]
    assert getattr(R, name)(model, x, target=1, **options).attribution.isfinite().all()
    for wrong in (5, -1):
        with pytest.raises(th.RecipeError, match=f"there is no class {wrong}; the model has 5, 0 to 4"):
            getattr(R, name)(model, x, target=wrong, **options)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*SLOPES, *SWEEPS])
def test_it_is_the_same_on_a_frozen_model_without_gradients_around(name, around):
    model, x = model_for(name)
    ask = functools.partial(getattr(R, name), target=1, **{**SLOPES, **SWEEPS}[name])
    wanted = ask(model, x).attribution
    model.requires_grad_(False)
    with around():
        torch.testing.assert_close(ask(model, x.clone()).attribution.clone(), wanted)


@pytest.mark.parametrize("name", SLOPES)
def test_a_target_without_a_slope_is_reported(name):
    model, x = model_for(name)
    with pytest.raises(th.RecipeError, match="by differentiable operations"):
        getattr(R, name)(model, x, target=lambda output: output.argmax(1).double(), **SLOPES[name])


@pytest.mark.parametrize("name", [*SLOPES, "occlusion", "scorecam"])
def test_whole_numbers_are_no_input_to_follow_a_slope_to(name):
    model, x = model_for(name)
    options = {**SLOPES, **SWEEPS}[name]
    if name == "layer_integrated_gradients":  # They may be its input, and cannot be the value at its point.
        with pytest.raises(th.RecipeError, match=r"needs a floating-point value.*of torch.int64"):
            R.layer_integrated_gradients(Tokens(), torch.tensor([[1, 2]]), point=":in", target=0)
        return
    with pytest.raises(th.RecipeError, match=r"needs a floating-point input.*got torch.int64"):
        getattr(R, name)(model, (x * 255).long(), target=1, **options)


@pytest.mark.parametrize("name", [*CAMS, "scorecam"])
def test_a_layer_without_a_map_is_no_place_for_a_cam(name):
    with pytest.raises(th.RecipeError, match=rf"{name.replace('guided_', '')} needs a layer with a spatial map"):
        getattr(R, name)(reused(), images(1), point="fc", target=1)


def test_a_batch_where_one_image_is_meant_is_reported():
    with pytest.raises(th.RecipeError, match=r"scorecam takes one image.*got a batch of 2.*image\[0:1\]"):
        R.scorecam(reused(), images(2), point="conv2", target=1)
