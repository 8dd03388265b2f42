"""Attribution, compared with captum on the same model and input; ``make references`` runs it.

Both compute in float64 and agree to 1e-9 of the largest value; where captum holds its weights, sums or noise in float32
(``ROUGHER``), to 1e-6.
"""

import functools
import importlib

import pytest
import torch
from reference_models import Net, Reused, Unrolled, images, made
from torch import nn

import tenterhook as th

pytestmark = [
    pytest.mark.references,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # captum warns of hooks it sets and of gradients it switches on
]

TARGET = 3
ROUGHER = {"integrated_gradients", "layer_integrated_gradients", "occlusion"}
R = th.recipes


@pytest.fixture
def attr():
    return importlib.import_module("captum.attr")


def agree(found, wanted, tolerance=1e-9):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


SAME = {
    "saliency": lambda attr, model, x: (R.saliency, attr.Saliency(model).attribute(x, TARGET)),
    "input_x_gradient": lambda attr, model, x: (R.input_x_gradient, attr.InputXGradient(model).attribute(x, TARGET)),
    "guided_backprop": lambda attr, model, x: (R.guided_backprop, attr.GuidedBackprop(model).attribute(x, TARGET)),
    "deconvnet": lambda attr, model, x: (R.deconvnet, attr.Deconvolution(model).attribute(x, TARGET)),
    "integrated_gradients": lambda attr, model, x: (
        functools.partial(R.integrated_gradients, baseline=0.1, steps=30, batch=7),
        attr.IntegratedGradients(model).attribute(x, 0.1, TARGET, n_steps=30),
    ),
    "layer_integrated_gradients": lambda attr, model, x: (
        functools.partial(R.layer_integrated_gradients, point="conv2", steps=20, batch=9),
        attr.LayerIntegratedGradients(model, model.conv2).attribute(x, target=TARGET, n_steps=20),
    ),
    "conductance": lambda attr, model, x: (
        functools.partial(R.conductance, point="conv2", steps=20, batch=9),
        attr.LayerConductance(model, model.conv2).attribute(x, target=TARGET, n_steps=20),
    ),
    "gradcam": lambda attr, model, x: (
        functools.partial(R.gradcam, point="conv2"),
        attr.LayerGradCam(model, model.conv2).attribute(x, TARGET, relu_attributions=True)[:, 0],
    ),
    "occlusion": lambda attr, model, x: (
        functools.partial(R.occlusion, window=(4, 3), stride=(3, 2), baseline=0.2),
        attr.Occlusion(model).attribute(x, (3, 4, 3), (3, 3, 2), 0.2, TARGET),
    ),
    "feature_ablation": lambda attr, model, x: (
        R.feature_ablation,
        attr.FeatureAblation(model).attribute(x, target=TARGET),
    ),
    "feature_ablation by mask": lambda attr, model, x: (
        functools.partial(R.feature_ablation, mask=torch.arange(100).reshape(10, 10) // 7, baseline=0.5),
        attr.FeatureAblation(model).attribute(
            x, 0.5, TARGET, feature_mask=torch.arange(100).reshape(1, 1, 10, 10) // 7
        ),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_it_is_what_captum_finds(attr, name):
    recipe, wanted = SAME[name](attr, made(Net), images())
    agree(recipe(made(Net), images(), target=TARGET).attribution, wanted, 1e-6 if name in ROUGHER else 1e-9)


def test_the_error_of_integrated_gradients_is_captums_delta(attr):
    model, x = made(Net), images()
    _, delta = attr.IntegratedGradients(model).attribute(x, target=TARGET, n_steps=10, return_convergence_delta=True)
    agree(
        R.integrated_gradients(model, x, target=TARGET, steps=10).error, delta, 1e-3
    )  # A small difference of rounded numbers.


def test_channel_ablation_is_what_captum_finds(attr):
    model, x = made(Net), images()
    channels = torch.arange(8).reshape(1, 8, 1, 1)
    wanted = attr.LayerFeatureAblation(model, model.conv2).attribute(x, target=TARGET, layer_mask=channels)
    agree(R.channel_ablation(model, x, target=TARGET, point="conv2").attribution, wanted[:, :, 0, 0])


def test_guided_gradcam_is_what_captum_finds(attr):
    model, x = made(Net), images()
    wanted = attr.GuidedGradCam(model, model.conv2).attribute(x, TARGET, interpolate_mode="bilinear")
    # The map is enlarged in float32 here.
    agree(R.guided_gradcam(model, x, target=TARGET, point="conv2").attribution, wanted, 1e-6)


def test_smoothgrad_is_what_captum_finds_with_the_same_noise(attr):
    model, x = made(Net).float(), images(1).float()
    torch.manual_seed(5)
    std = 0.15 * float(x.max() - x.min())
    tunnel = attr.NoiseTunnel(attr.Saliency(model))
    wanted = tunnel.attribute(x, nt_samples=20, stdevs=std, target=TARGET, nt_type="smoothgrad", abs=False)
    agree(R.smoothgrad(model, x, target=TARGET, samples=20, seed=5).attribution, wanted, 1e-5)


def test_deeplift_is_what_captum_finds(attr):
    model, x = Unrolled(made(Reused)), images()
    wanted = attr.DeepLift(model).attribute(x, torch.full_like(x, 0.1), TARGET)
    agree(R.deeplift(model, x, target=TARGET, baseline=0.1).attribution, wanted)


# -- where captum is not right, a model that was unrolled by hand is the truth -----------------------------------------


@pytest.mark.parametrize("name", ["guided_backprop", "deconvnet"])
def test_relus_that_are_reused_in_place_and_functions(attr, name):
    model, x = made(Reused), images()
    truth = SAME[name](attr, Unrolled(model), x)[1]
    agree(getattr(R, name)(model, x, target=TARGET).attribution, truth)
    # captum misses the function, so that it cannot be taken for the truth here.
    captums = SAME[name](attr, model, x)[1]
    assert (captums - truth).abs().max() > 0.01 * truth.abs().max()


def test_gradcam_at_a_layer_that_is_called_twice_asks_which_call(attr):
    model, x = made(Reused), images()
    unrolled = Unrolled(model)
    with pytest.raises(th.AmbiguousCall, match="relu#1"):
        R.gradcam(model, x, point="relu", target=TARGET)
    for call, layer in enumerate((unrolled.relu1, unrolled.relu2)):
        wanted = attr.LayerGradCam(unrolled, layer).attribute(x, TARGET, relu_attributions=True)[:, 0]
        agree(R.gradcam(model, x, point=f"relu#{call}", target=TARGET).attribution, wanted)


def test_gradcam_at_a_layer_before_one_in_place(attr):
    model, x = made(Reused), images()
    unrolled = Unrolled(model)
    wanted = attr.LayerGradCam(unrolled, unrolled.conv2).attribute(x, TARGET, relu_attributions=True)[:, 0]
    agree(R.gradcam(model, x, point="conv2", target=TARGET).attribution, wanted)


def test_deeplift_through_a_max_pooling_adds_up_and_captums_does_not(attr):
    model, x = made(Net), images()
    start = torch.full_like(x, 0.1)
    with torch.no_grad():
        change = (model(x) - model(start))[:, TARGET]
    found = R.deeplift(model, x, target=TARGET, baseline=0.1)
    torch.testing.assert_close(found.attribution.sum((1, 2, 3)), change)
    captums = attr.DeepLift(model).attribute(x, start, TARGET).sum((1, 2, 3))
    assert (captums - change).abs().max() > 0.01 * change.abs().max()


def test_deeplift_with_one_relu_in_place_for_all(attr):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            return self.c(self.relu(self.b(self.relu(self.a(x)))))

    model = made(Shared)
    unrolled = nn.Sequential(model.a, nn.ReLU(), model.b, nn.ReLU(), model.c)
    x = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5
    truth = attr.DeepLift(unrolled).attribute(x, torch.zeros_like(x), TARGET)
    agree(R.deeplift(model, x, target=TARGET).attribution, truth)


def test_attribution_of_text():
    from captum.attr import LayerIntegratedGradients
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=32, initializer_range=0.2)
    model = GPT2LMHeadModel(config).eval()
    prompt, output = [4, 9, 2, 7, 11], [3, 8, 5]
    found = th.recipes.text(model, None, prompt, output, baseline=0, steps=50)
    for place, token in enumerate(output):
        ids = torch.tensor([prompt + output[:place]])

        def score(ids, token=token):
            return model(ids).logits[:, -1].log_softmax(-1)[:, token]

        theirs = LayerIntegratedGradients(score, model.transformer.wte).attribute(
            ids, baselines=torch.zeros_like(ids), n_steps=50
        )
        expected = theirs.sum(-1)[0]
        assert torch.allclose(found.values[0][: len(expected), place], expected.float(), atol=1e-5)
