"""Class activation maps, compared with the package grad-cam on the same model and input; ``make references`` runs it.

captum has Grad-CAM alone. The maps are compared before grad-cam stretches each to lie between 0 and 1, and in the size
of the image, because it enlarges masks in another way. It holds scores in float32: both agree to 1e-5 of the largest
value.
"""

import importlib
import sys
import types

import numpy as np
import pytest
import torch
from reference_models import Net, Reused, Unrolled, images, made

import tenterhook as th

pytestmark = [pytest.mark.references, pytest.mark.filterwarnings("ignore")]  # Its own imports warn of what will change.

TARGET = 3
SCALE = 1e3  # Grad-CAM++ divides by squares of the gradient and adds 1e-6 to them there, which must not be seen.
KINDS = {
    "gradcam": "GradCAM", "gradcam_plus_plus": "GradCAMPlusPlus", "layercam": "LayerCAM", "scorecam": "ScoreCAM",
}  # fmt: skip


class Nothing(types.ModuleType):
    """Stands for torchvision, which grad-cam imports for its pictures and none of its maps needs."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return object


@pytest.fixture
def package(monkeypatch):
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        monkeypatch.setitem(sys.modules, name, Nothing(name))
    return importlib.import_module("pytorch_grad_cam")


def theirs(package, kind, model, layer, x, scale):
    """The map before it is stretched."""
    kept = []
    with getattr(package, kind)(model=model, target_layers=[layer]) as cam:
        own = cam.get_cam_image
        cam.get_cam_image = lambda *args: kept.append(own(*args)) or kept[-1]
        cam(input_tensor=x, targets=[lambda scores: scores[TARGET] * scale] * len(x))
    return torch.from_numpy(np.maximum(kept[0], 0))


@pytest.mark.parametrize("name", KINDS)
def test_it_is_what_grad_cam_finds(package, name):
    model, count = made(Net), 1 if name == "scorecam" else 2
    x, scale = images(count), 1.0 if name == "scorecam" else SCALE
    wanted = theirs(package, KINDS[name], model, model.conv2, x, scale)
    found = getattr(th.recipes, name)(model, x, point="conv2", target=lambda scores: scores[:, TARGET] * scale)
    assert found.attribution.shape == wanted.shape
    assert (found.attribution - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", ["gradcam", "layercam"])
def test_each_call_of_a_reused_layer_is_right_where_grad_cam_takes_the_first_silently(package, name):
    model, x = made(Reused), images()
    unrolled = Unrolled(model)
    truths = [theirs(package, KINDS[name], unrolled, layer, x, SCALE) for layer in (unrolled.relu1, unrolled.relu2)]
    for call, truth in enumerate(truths):
        found = getattr(th.recipes, name)(
            model, x, point=f"relu#{call}", target=lambda scores: scores[:, TARGET] * SCALE
        )
        assert (found.attribution - truth).abs().max() <= 1e-5 * truth.abs().max()
    torch.testing.assert_close(theirs(package, KINDS[name], model, model.relu, x, SCALE), truths[0])
