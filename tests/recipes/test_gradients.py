"""Attribution by gradients and along paths, compared with autograd, differences, sums by hand and unrolled models."""

import pytest
import torch
from recipe_models import Tokens, images, reused, unrolled
from torch import nn

import tenterhook as th
from tenterhook.testing import no_leak, untouched

R = th.recipes
TARGET = 3


class Guided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, came):
        return came.clamp(min=0) * (ctx.saved_tensors[0] > 0)


class Deconv(Guided):
    @staticmethod
    def backward(ctx, came):
        return came.clamp(min=0)


def slope(model, x, target=TARGET, relu=torch.relu):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(unrolled(model, x, relu)["out"][:, target].sum(), x)[0]


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        (R.saliency, lambda model, x: slope(model, x).abs()),
        (R.input_x_gradient, lambda model, x: slope(model, x) * x),
        (R.guided_backprop, lambda model, x: slope(model, x, relu=Guided.apply)),
        (R.deconvnet, lambda model, x: slope(model, x, relu=Deconv.apply)),
    ],
)
def test_a_model_with_one_relu_in_place_and_a_function_is_right(recipe, wanted):
    model, x = reused(), images()
    kept = x.clone()
    with untouched(model):
        found = recipe(model, x, target=TARGET)
    torch.testing.assert_close(found.attribution, wanted(model, x))
    assert torch.equal(x, kept)
    assert x.grad is None
    assert not x.requires_grad
    assert all(each.grad is None for each in model.parameters())
    assert found.map.shape == (2, 8, 8)


def test_the_gradient_is_what_differences_show():
    model, x = reused(), images(1)
    found = R.input_x_gradient(model, x, target=TARGET).attribution / x
    step = 1e-6
    for place in [(0, 0, 3, 4), (0, 2, 7, 0)]:
        nudged = x.clone()
        nudged[place] += step
        change = (model(nudged) - model(x))[0, TARGET] / step
        assert found[place].item() == pytest.approx(change.item(), rel=1e-4)


@pytest.mark.parametrize("recipe", [R.saliency, R.guided_backprop, R.integrated_gradients, R.smoothgrad])
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_it_works_without_gradients_around_and_on_a_frozen_model(recipe, around):
    model, x = reused(), images()
    wanted = recipe(model, x, target=TARGET).attribution
    model.requires_grad_(False)
    with around():
        found = recipe(model, x.clone(), target=TARGET).attribution
    torch.testing.assert_close(found.clone(), wanted)


def test_nothing_is_kept():
    model, x = reused(), images(1)
    R.guided_backprop(model, x, target=TARGET)
    with no_leak():
        R.guided_backprop(model, x, target=TARGET)
        R.integrated_gradients(model, x, target=TARGET, steps=3)
        R.gradcam(model, x, point="conv2", target=TARGET)
        R.lrp(model, x, target=TARGET)


def test_targets_of_every_kind_mean_the_same():
    model, x = reused(), images()
    wanted = R.saliency(model, x, target=torch.tensor([3, 1])).attribution
    torch.testing.assert_close(wanted[0], R.saliency(model, x, target=3).attribution[0])
    torch.testing.assert_close(wanted[1], R.saliency(model, x, target=(1,)).attribution[1])
    chosen = R.saliency(model, x, target=lambda out: out[range(2), [3, 1]]).attribution
    torch.testing.assert_close(chosen, wanted)
    highest = R.saliency(model, x)
    assert torch.equal(highest.target, model(x).argmax(1))
    torch.testing.assert_close(highest.attribution, R.saliency(model, x, target=highest.target).attribution)


def test_other_arguments_come_along_and_are_repeated_with_the_examples():
    torch.manual_seed(0)

    class Scaled(nn.Linear):
        def forward(self, x, scale, *, shift):
            return super().forward(x * scale[:, None]) + shift

    model, x = Scaled(4, 3).double(), torch.randn(2, 4).double()
    scale, shift = torch.tensor([2.0, 3.0]).double(), torch.tensor(1.0).double()

    class Bound(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, scale):
            return self.inner(x, scale, shift=shift)

    found = R.integrated_gradients(Bound(), x, target=1, more=(scale,), steps=4, batch=3)
    torch.testing.assert_close(found.attribution, x * scale[:, None] * model.weight[1])
    named = R.integrated_gradients(model, x, target=1, more={"scale": scale, "shift": shift}, steps=4, batch=3)
    torch.testing.assert_close(named.attribution, found.attribution)


# -- SmoothGrad and paths ---------------------------------------------------------------------------------------------


def test_smoothgrad_is_the_mean_over_noise_from_a_generator_of_its_own():
    model, x = reused(), images()
    with untouched(model):  # Torch's generator too.
        found = R.smoothgrad(model, x, target=TARGET, samples=6, noise=0.2, seed=3)
    drawn = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    total = []
    for example in range(2):
        width = 0.2 * (x[example].max() - x[example].min())
        noisy = x[example] + drawn[example * 6 : example * 6 + 6] * width
        total.append(slope(model, noisy))
    wanted = torch.stack(total)
    torch.testing.assert_close(found.attribution, wanted.mean(1))
    squared = R.smoothgrad(model, x, target=TARGET, samples=6, noise=0.2, seed=3, kind="squared").attribution
    torch.testing.assert_close(squared, wanted.square().mean(1))
    variance = R.smoothgrad(model, x, target=TARGET, samples=6, noise=0.2, seed=3, kind="variance").attribution
    torch.testing.assert_close(variance, wanted.var(1, correction=0))


def test_integrated_gradients_are_the_integral_and_the_error_says_how_far_off():
    model, x = reused(), images()
    start = torch.full_like(x, 0.2)
    found = R.integrated_gradients(model, x, target=TARGET, baseline=0.2, steps=200, batch=64)
    places = (torch.arange(2000) + 0.5) / 2000
    integral = sum(slope(model, start + place * (x - start)) for place in places) / 2000 * (x - start)
    torch.testing.assert_close(found.attribution, integral, rtol=0, atol=5e-3 * integral.abs().max().item())
    with torch.no_grad():
        change = (model(x) - model(start))[:, TARGET]
    torch.testing.assert_close(found.error, found.attribution.sum((1, 2, 3)) - change)
    rough = R.integrated_gradients(model, x, target=TARGET, baseline=0.2, steps=3)
    assert found.error.abs().max() < rough.error.abs().max()
    assert found.error.abs().max() < 0.01 * change.abs().max()


@pytest.mark.parametrize("batch", [1, 7, 40, 1000])
def test_the_size_of_a_batch_changes_nothing(batch):
    model, x = reused(), images()
    wanted = R.integrated_gradients(model, x, target=TARGET, steps=10).attribution
    torch.testing.assert_close(
        R.integrated_gradients(model, x, target=TARGET, steps=10, batch=batch).attribution, wanted
    )
    through = R.conductance(model, x, point="conv2", target=TARGET, steps=10).attribution
    again = R.conductance(model, x, point="conv2", target=TARGET, steps=10, batch=batch).attribution
    torch.testing.assert_close(again, through)


def test_whole_numbers_are_explained_where_they_have_become_vectors():
    torch.manual_seed(0)
    model, ids = Tokens().double(), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    found = R.layer_integrated_gradients(model, ids, point="embed", target=1, steps=30)
    assert found.attribution.shape == (2, 4, 6)
    assert found.map.shape == (2, 4)
    with torch.no_grad():
        change = (model(ids) - model(torch.zeros_like(ids)))[:, 1]
    torch.testing.assert_close(found.attribution.sum((1, 2)), change)
    # By hand: the same path between the two embeddings.
    end, start = model.embed(ids).detach(), model.embed(torch.zeros_like(ids)).detach()
    total = torch.zeros_like(end)
    for place in (torch.arange(3000) + 0.5) / 3000:
        leaf = (start + place * (end - start)).requires_grad_()
        out = model.head(torch.tanh(model.mix(leaf)).mean(1))[:, 1].sum()
        total += torch.autograd.grad(out, leaf)[0] / 3000
    torch.testing.assert_close(found.attribution, total * (end - start), rtol=1e-4, atol=1e-8)


def test_conductance_is_the_sum_over_steps_at_the_right_call():
    model, x = reused(), images()
    found = R.conductance(model, x, point="relu#1", target=TARGET, steps=40, batch=16)
    at = (torch.as_tensor(__import__("numpy").polynomial.legendre.leggauss(41)[0]) + 1) / 2
    values, slopes = [], []
    for place in at:
        names = unrolled(model, x * place)
        values.append(names["relu#1"])
        slopes.append(torch.autograd.grad(names["out"][:, TARGET].sum(), names["relu#1"])[0])
    wanted = sum((values[k + 1] - values[k]).detach() * slopes[k] for k in range(40))
    torch.testing.assert_close(found.attribution, wanted)
    with torch.no_grad():
        change = (model(x) - model(x * 0))[:, TARGET]
    assert found.error.abs().max() < 0.05 * change.abs().max()


@pytest.mark.parametrize("recipe", [R.layer_integrated_gradients, R.conductance, R.gradcam, R.layercam, R.scorecam])
def test_a_point_that_is_passed_several_times_is_asked_about(recipe):
    with pytest.raises(th.AmbiguousCall, match="relu#1"):
        recipe(reused(), images(1), point="relu", target=TARGET)


# -- bad input --------------------------------------------------------------------------------------------------------


def argmax(output):
    return output.argmax(1).double()


@pytest.mark.parametrize("recipe", [R.saliency, R.integrated_gradients, R.smoothgrad, R.input_x_gradient])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"target": 5}, "no class 5; the model has 5, 0 to 4"),
        ({"target": -1}, "no class -1"),
        ({"target": torch.tensor([1, 2, 3])}, "one class for each of the 2 examples"),
        ({"target": torch.tensor([1.0, 2.0])}, "one class for each"),
        ({"target": "cat"}, "target= is a class"),
        ({"target": True}, "target= is a class"),
        ({"target": (9,)}, "not an index into an example's output"),
        ({"target": argmax}, "by differentiable operations"),
        ({"target": lambda out: out}, r"a tensor of \[\d+\]"),
        ({"target": lambda out: out.tolist()}, "got list"),
    ],
)
def test_a_target_that_cannot_be_explained_is_reported(recipe, options, text):
    with pytest.raises(th.RecipeError, match=text):
        recipe(reused(), images(), **options)


def test_inputs_that_have_no_gradient_are_reported():
    with pytest.raises(th.RecipeError, match=r"needs a floating-point input.*\n.*layer_integrated_gradients"):
        R.saliency(Tokens(), torch.tensor([[1, 2]]))
    with pytest.raises(th.RecipeError, match="got a list"):
        R.saliency(reused(), [1, 2])
    with pytest.raises(th.RecipeError, match="examples in front"):
        R.saliency(nn.Identity(), torch.tensor(1.0))
    with pytest.raises(th.RecipeError, match=r"nn\.Module; got a function"):
        R.saliency(argmax, images())
    with pytest.raises(th.RecipeError, match=r"broadcasts to the input, \[2, 3, 8, 8\]"):
        R.integrated_gradients(reused(), images(), baseline=torch.zeros(5), target=0)
    with pytest.raises(th.RecipeError, match="positive"):
        R.integrated_gradients(reused(), images(), steps=0, target=0)
    with pytest.raises(th.RecipeError, match="positive"):
        R.smoothgrad(reused(), images(), samples=-1, target=0)
    with pytest.raises(th.RecipeError, match="kind="):
        R.smoothgrad(reused(), images(), kind="cubed", target=0)


def test_outputs_that_need_a_target_say_which():
    class Pairs(nn.Module):
        def forward(self, x):
            return {"logits": x}

    with pytest.raises(th.RecipeError, match="returns a dict, so target= must be a function"):
        R.saliency(Pairs(), torch.rand(2, 3))
    with pytest.raises(th.RecipeError, match=r"output is \[3, 4\].*\n.*target=\(0, 0\)"):
        R.saliency(nn.Identity(), torch.rand(2, 3, 4))
    found = R.saliency(nn.Identity(), torch.rand(2, 3, 4), target=(1, 2)).attribution
    assert found.nonzero().tolist() == [[0, 1, 2], [1, 1, 2]]
    alone = R.input_x_gradient(nn.Flatten(0), torch.rand(2, 1))
    assert torch.equal(alone.attribution, alone.inputs)


def test_a_model_without_a_relu_has_no_guided_backprop():
    with pytest.raises(th.RecipeError, match="there is none"):
        R.guided_backprop(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.rand(1, 3), target=0)


def test_training_mode_is_warned_of():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    with pytest.warns(th.TenterhookWarning, match="Dropout.*model.eval"):
        R.saliency(model, torch.rand(1, 3), target=0)
