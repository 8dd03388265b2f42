"""Class activation maps, compared with the same computed by hand on a model that was unrolled by hand."""

import pytest
import torch
from recipe_models import Tokens, images, reused, unrolled
from torch import nn
from torch.nn import functional as F

import tenterhook as th
from tenterhook.testing import untouched

R = th.recipes
TARGET = 3
POINTS = ["conv1", "conv2", "conv3", "relu#0", "relu#1"]


def by_hand(model, x, point):
    names = unrolled(model, x)
    slope = torch.autograd.grad(names["out"][:, TARGET].sum(), names[point])[0]
    return names[point].detach(), slope


@pytest.mark.parametrize("point", POINTS)
def test_gradcam(point):
    model, x = reused(), images()
    value, slope = by_hand(model, x, point)
    wanted = (slope.mean((2, 3), keepdim=True) * value).sum(1).relu()
    with untouched(model):
        found = R.gradcam(model, x, point=point, target=TARGET)
    torch.testing.assert_close(found.attribution, wanted)
    assert found.settings == {"point": point}
    assert found.map.shape == (2, 8, 8)


@pytest.mark.parametrize("point", POINTS)
def test_layercam(point):
    model, x = reused(), images()
    value, slope = by_hand(model, x, point)
    found = R.layercam(model, x, point=point, target=TARGET).attribution
    torch.testing.assert_close(found, (slope.relu() * value).sum(1).relu())


@pytest.mark.parametrize("point", POINTS)
def test_gradcam_plus_plus_follows_the_formula(point):
    model, x = reused(), images()
    value, slope = by_hand(model, x, point)
    wanted = torch.zeros(2, 8, 8, dtype=torch.float64)
    for example in range(2):
        for channel in range(value.shape[1]):
            a, g = value[example, channel], slope[example, channel]
            under = 2 * g**2 + a.sum() * g**3
            share = torch.where(g == 0, torch.zeros_like(g), g**2 / torch.where(under == 0, torch.ones_like(g), under))
            wanted[example] += (share * g.relu()).sum() * a
    found = R.gradcam_plus_plus(model, x, point=point, target=TARGET).attribution
    torch.testing.assert_close(found, wanted.relu())


@pytest.mark.parametrize("point", ["conv2", "relu#1"])
def test_scorecam_is_the_run_of_each_mask(point):
    model, x = reused(), images(1)
    value = unrolled(model, x)[point].detach()
    with torch.no_grad():
        scores = []
        for channel in range(6):
            mask = F.interpolate(value[:, channel : channel + 1], (8, 8), mode="bilinear")
            mask = (mask - mask.min()) / (float(mask.max() - mask.min()) or 1)  # A flat map hides all.
            scores.append(unrolled(model, x * mask)["out"][0, TARGET])
        wanted = (torch.stack(scores).softmax(0)[:, None, None] * value[0]).sum(0).relu()[None]
    with untouched(model):
        found = R.scorecam(model, x, point=point, target=TARGET)
    torch.testing.assert_close(found.attribution, wanted, rtol=1e-5, atol=1e-8)  # Masks are enlarged in float32.
    assert any("batches" in line for line in found.how)


def test_guided_gradcam_is_the_product_of_the_two():
    model, x = reused(), images()
    cam, fine = R.gradcam(model, x, point="conv3"), R.guided_backprop(model, x)
    found = R.guided_gradcam(model, x, point="conv3")
    torch.testing.assert_close(found.attribution, fine.attribution * cam.map[:, None])
    assert torch.equal(found.target, model(x).argmax(1))


def test_a_frozen_model_and_no_gradients_around():
    model, x = reused(), images()
    wanted = R.gradcam(model, x, point="conv2", target=TARGET).attribution
    model.requires_grad_(False)
    with torch.no_grad():
        torch.testing.assert_close(R.gradcam(model, x, point="conv2", target=TARGET).attribution, wanted)
    model.fc.requires_grad_(True)  # As in transfer learning: a new head on a frozen body.
    torch.testing.assert_close(R.gradcam(model, x, point="conv2", target=TARGET).attribution, wanted)


def test_the_map_lies_where_the_class_is():
    # A model that looks for a bright spot: its map has to lie on it.
    conv = nn.Conv2d(1, 2, 3, padding=1, bias=False)
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[1, 0, 1, 1] = 1.0
    model = nn.Sequential(conv, nn.ReLU(inplace=True), nn.AdaptiveMaxPool2d(1), nn.Flatten())
    image = torch.zeros(1, 1, 16, 16)
    image[0, 0, 11, 4] = 1.0
    for recipe in (R.gradcam, R.gradcam_plus_plus, R.layercam, R.scorecam):
        assert recipe(model, image, point="1", target=1).map[0].argmax().item() == 11 * 16 + 4


def test_tokens_of_a_vision_transformer_are_laid_out():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16,
                       patch_size=4, num_labels=3)  # fmt: skip
    model, x = ViTForImageClassification(config).eval(), torch.rand(2, 3, 16, 16)
    point = next(str(each) for each in th.points(model, "vit.layers.0"))
    with pytest.raises(th.RecipeError, match=r"\[2, 17, 16\].*\n.*reshape="):
        R.gradcam(model, x, point=point, target=1)
    lay = lambda value: value[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    found = R.gradcam(model, x, point=point, target=1, reshape=lay)
    assert found.attribution.shape == (2, 4, 4)
    assert found.map.shape == (2, 16, 16)


@pytest.mark.parametrize("recipe", [R.gradcam, R.gradcam_plus_plus, R.layercam, R.scorecam, R.guided_gradcam])
def test_what_has_no_map_is_reported(recipe):
    model, x = reused(), images(1)
    with pytest.raises(th.RecipeError, match=r"spatial map.*the value at 'fc' is \[1, 5\].*\n.*earlier point"):
        recipe(model, x, point="fc", target=TARGET)
    with pytest.raises(th.AddressError, match="conv2"):
        recipe(model, x, point="conv22", target=TARGET)
    with pytest.raises(th.RecipeError, match="no class 99"):
        recipe(model, x, point="conv2", target=99)
    with pytest.raises(th.RecipeError, match="floating-point"):
        recipe(model, torch.zeros(1, 3, 8, 8, dtype=torch.uint8), point="conv2", target=TARGET)
    with pytest.raises(th.RecipeError, match="floating-point"):
        recipe(Tokens(), torch.tensor([[1, 2]]), point="mix", target=0)


def test_an_image_without_a_batch_is_reported():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(1), nn.Linear(36, 4))
    with pytest.raises(th.RecipeError, match=r"give image\[None\]"):
        R.gradcam(model, torch.rand(3, 8, 8), point="0", target=lambda out: out[:3, 0])
    with pytest.raises(th.RecipeError, match=r"one image.*batch of 2"):
        R.scorecam(reused(), images(2), point="conv2", target=TARGET)


def test_a_point_from_which_nothing_flows_to_the_target_is_reported():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(2, 2)

        def forward(self, x):
            return self.fc(self.conv(x).detach().mean((2, 3)))

    with pytest.raises(th.RecipeError, match="'conv'"):
        R.gradcam(Detached(), torch.rand(1, 1, 5, 5), point="conv", target=0)
