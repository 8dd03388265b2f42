"""Attacks on a net that reads digits, compared with the same written by hand, and with geometry where it is known."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import tenterhook as th
from tenterhook.recipes._norm_ball import Ball
from tenterhook.testing import untouched

recipes = th.recipes


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


@pytest.fixture(scope="module")
def net(digits):
    images, labels = digits
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 32), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        batch = torch.randint(0, 1500, (128,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return model.eval()


@pytest.fixture
def some(digits):
    return digits[0][1500:1532], digits[1][1500:1532]


def slope(model, images, labels):
    leaf = images.clone().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(model(leaf), labels), leaf)[0]


ATTACKS = {
    "fgsm": lambda m, x, y, **kw: recipes.fgsm(m, x, y, eps=0.1, **kw),
    "bim": lambda m, x, y, **kw: recipes.bim(m, x, y, eps=0.1, steps=5, **kw),
    "bim 2": lambda m, x, y, **kw: recipes.bim(m, x, y, eps=0.9, steps=5, norm=2, **kw),
    "pgd": lambda m, x, y, **kw: recipes.pgd(m, x, y, eps=0.1, steps=5, **kw),
    "pgd 2": lambda m, x, y, **kw: recipes.pgd(m, x, y, eps=0.9, steps=5, norm=2, **kw),
    "features": lambda m, x, y: recipes.feature_attack(m, x, point="5", eps=0.1, steps=5),
    "features 2": lambda m, x, y: recipes.feature_attack(m, x, point="5", eps=0.9, steps=5, norm=2),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_the_budget_holds_to_the_last_bit_and_most_of_it_is_used(net, some, name):
    images, labels = some
    with untouched(net):
        found = ATTACKS[name](net, images, labels)
    eps = 0.9 if "2" in name else 0.1
    change = found.examples.double() - images.double()
    size = change.flatten(1).norm(dim=1) if "2" in name else change.abs().amax((1, 2, 3))
    assert bool((size <= eps).all())
    assert bool((size > 0.5 * eps).all())
    assert found.examples.min() >= 0
    assert found.examples.max() <= 1
    torch.testing.assert_close(found.distance, size, rtol=0, atol=1e-15)
    assert found.examples.dtype is images.dtype
    assert not found.examples.requires_grad


@pytest.mark.parametrize("name", ATTACKS)
def test_success_is_what_the_model_says_of_the_examples(net, some, name):
    images, labels = some
    found = ATTACKS[name](net, images, labels)
    with torch.no_grad():
        assert torch.equal(found.after, net(found.examples).argmax(1))
        assert torch.equal(found.before, net(images).argmax(1))
    assert torch.equal(found.success, found.after != (found.before if "features" in name else labels))
    assert found.rate == found.success.float().mean()
    assert found.rate > (0 if name == "features" else 0.25)


def test_fgsm_is_one_step_along_the_sign(net, some):
    images, labels = some
    found = recipes.fgsm(net, images, labels, eps=0.07)
    torch.testing.assert_close(found.examples, (images + 0.07 * slope(net, images, labels).sign()).clamp(0, 1))


def test_bim_is_the_loop_by_hand(net, some):
    images, labels = some
    truth = images
    for _ in range(7):
        truth = truth + 0.02 * slope(net, truth, labels).sign()
        truth = torch.max(torch.min(truth, images + 0.05), images - 0.05).clamp(0, 1)
    found = recipes.bim(net, images, labels, eps=0.05, steps=7, step=0.02)
    torch.testing.assert_close(found.examples, truth)
    again = recipes.pgd(net, images, labels, eps=0.05, steps=7, step=0.02, start="image")
    assert torch.equal(found.examples, again.examples)


def test_pgd_in_l2_is_the_loop_by_hand(net, some):
    images, labels = some
    truth = images
    for _ in range(6):
        way = slope(net, truth, labels)
        change = truth + 0.3 * way / way.flatten(1).norm(dim=1)[:, None, None, None] - images
        size = change.flatten(1).norm(dim=1)[:, None, None, None]
        truth = (images + change * (0.8 / size).clamp(max=1)).clamp(0, 1)
    found = recipes.pgd(net, images, labels, eps=0.8, steps=6, step=0.3, norm=2, start="image")
    torch.testing.assert_close(found.examples, truth, atol=1e-5, rtol=1e-4)


def test_a_target_is_reached_and_descends(net, some):
    images, labels = some
    aim = (labels + 1) % 10
    found = recipes.pgd(net, images, labels, eps=0.4, steps=20, target=aim)
    assert torch.equal(found.success, net(found.examples).argmax(1) == aim)
    assert found.rate > 0.9
    one = recipes.pgd(net, images, labels, eps=0.4, steps=20, target=3)
    assert torch.equal(one.target, torch.full_like(labels, 3))
    assert one.rate > 0.9


@pytest.mark.parametrize("name", ["fgsm", "bim", "bim 2", "pgd", "pgd 2"])
def test_every_attack_can_be_aimed(net, some, name):
    images, labels = some
    aim = (labels + 3) % 10
    found = ATTACKS[name](net, images, labels, target=aim)
    with torch.no_grad():
        before, after = (F.cross_entropy(net(each), aim) for each in (images, found.examples))
        assert torch.equal(found.success, net(found.examples).argmax(1) == aim)
    assert after < before
    assert torch.equal(found.target, aim)


def test_a_random_start_depends_on_the_seed_alone(net, some):
    images, labels = some
    runs = [recipes.pgd(net, images, labels, steps=1, seed=seed).examples for seed in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    alone = recipes.pgd(net, images[:5], labels[:5], steps=3, start="image").examples
    together = recipes.pgd(net, images, labels, steps=3, start="image").examples
    torch.testing.assert_close(alone, together[:5])


def test_deepfool_finds_the_distance_to_the_boundary_of_a_linear_model():
    torch.manual_seed(1)
    model = nn.Linear(12, 4).double()
    images = torch.rand(20, 12).double() * 0.2 + 0.4
    scores = model(images).detach()
    labels = scores.argmax(1)
    rows = torch.arange(20)
    gap = scores[rows, labels][:, None] - scores
    between = (model.weight.detach()[labels][:, None] - model.weight.detach()[None]).norm(dim=2)
    truth = (gap / between).masked_fill(F.one_hot(labels, 4).bool(), torch.inf).amin(1)
    found = recipes.deepfool(model, images, labels, bounds=(-10, 10))
    assert found.success.all()
    torch.testing.assert_close(found.distance, truth * 1.02)


def test_deepfool_needs_less_than_a_budget_and_leaves_what_is_wrong_alone(net, some):
    images, labels = some
    lied = labels.clone()
    lied[0] = (net(images[:1]).argmax(1)[0] + 1) % 10
    with untouched(net):
        found = recipes.deepfool(net, images, lied)
    assert torch.equal(found.examples[0], images[0])
    assert found.success.all()
    assert found.examples.min() >= 0
    assert found.examples.max() <= 1
    # It goes hardly further than it has to: within half that way, PGD finds few.
    half = float(found.distance.median()) * 0.5
    assert recipes.pgd(net, images, labels, eps=half, steps=40, norm=2).rate < 0.5


def test_a_feature_attack_moves_the_features_to_those_of_the_guide(net, some):
    images, _ = some
    guide = images.roll(1, 0)
    with untouched(net):
        found = recipes.feature_attack(net, images, point="5", guide=guide, eps=0.3, steps=60)
    with torch.no_grad():
        own, aim, now = (net[:6](each) for each in (images, guide, found.examples))
    before, after = (own - aim).norm(dim=1), (now - aim).norm(dim=1)
    assert bool((after < before).all())
    assert float(after.mean()) < 0.7 * float(before.mean())
    assert found.settings["features before"] == pytest.approx(float(before.mean()), rel=1e-4)
    assert found.settings["features after"] == pytest.approx(float(after.mean()), rel=1e-4)
    assert torch.equal(found.success, after < (now - own).norm(dim=1))


def test_a_feature_attack_runs_no_further_than_its_point(net, some):
    calls = []
    handle = net[8].register_forward_hook(lambda *_: calls.append(1))
    recipes.feature_attack(net, some[0], point="5#0", steps=4)
    assert len(calls) == 2  # What the model says before and after.
    recipes.feature_attack(net, some[0], point="5", steps=4)
    handle.remove()
    assert len(calls) == 2 + 3  # And whether the point is passed again.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["inf", 2])
def test_a_ball_is_never_left_in_any_type(dtype, norm):
    torch.manual_seed(0)
    images = torch.cat([torch.rand(200, 6), torch.rand(200, 6) * 1e-3, torch.ones(1, 6), torch.zeros(1, 6)])
    images = (images * 2 - 1).to(dtype) if norm == 2 else images.to(dtype)
    low = -1.0 if norm == 2 else 0.0
    for eps in (8 / 255, 0.1, 1e-3, 0.5):
        ball = Ball(images, eps, norm, (low, 1.0))
        far = ball.inside(images + torch.randn(images.shape).to(dtype))
        change = far.double() - images.double()
        size = change.norm(dim=1) if norm == 2 else change.abs().amax(1)
        assert bool((size <= eps).all())
        assert float(far.min()) >= low
        assert float(far.max()) <= 1
        assert torch.equal(ball.inside(far), far)  # What is inside stays.
        start = ball.random(0)
        assert bool(((start.double() - images.double()).abs().amax(1) <= eps).all())


def test_rounding_alone_would_have_left_the_ball():
    """The usual way, clamp(x - eps, x + eps) in float32, does leave it: the test above can fail."""
    torch.manual_seed(0)
    images = torch.rand(1000)
    usual = torch.min(images + 1, images + 8 / 255)
    assert bool(((usual.double() - images.double()) > 8 / 255).any())


class Rounding(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.round().detach())


def test_bad_input_is_an_error(net, some):
    images, labels = some
    with pytest.raises(th.RecipeError, match=r"floating-point tensors; got torch.uint8.*/ 255"):
        recipes.pgd(net, (images * 255).byte(), labels)
    with pytest.raises(th.RecipeError, match=r"class 10, and the model has 10: 0 to 9"):
        recipes.pgd(net, images, torch.full_like(labels, 10))
    with pytest.raises(th.RecipeError, match=r"shape \[3\]; 32 images are given"):
        recipes.fgsm(net, images, labels[:3])
    with pytest.raises(th.RecipeError, match=r"as integers; got torch.float32"):
        recipes.fgsm(net, images, labels.float())
    with pytest.raises(th.RecipeError, match="outside the bounds 0 to 1"):
        recipes.fgsm(net, images - 0.5, labels)
    with pytest.raises(th.RecipeError, match="batch in front"):
        recipes.fgsm(net, torch.rand(8), labels)
    with pytest.raises(th.RecipeError, match="eps= is the radius"):
        recipes.pgd(net, images, labels, eps=-1)
    with pytest.raises(th.RecipeError, match="steps= is the number of steps"):
        recipes.pgd(net, images, labels, steps=0)
    with pytest.raises(th.RecipeError, match='norm= is "inf" or 2'):
        recipes.pgd(net, images, labels, norm=1)
    with pytest.raises(th.RecipeError, match="does not depend on the images"):
        recipes.pgd(Rounding(net), images, labels)
    with pytest.raises(th.RecipeError, match="does not depend on the images"):
        recipes.feature_attack(Rounding(net), images, point="inner.5")
    with pytest.raises(th.RecipeError, match=r"this model returns \[32, 8, 8, 8\]"):
        recipes.pgd(net[:3], images, labels)
    with pytest.raises(th.RecipeError, match="one point is needed"):
        recipes.feature_attack(net, images, point="*")
    with pytest.raises(th.RecipeError, match="guide= has the shape"):
        recipes.feature_attack(net, images, point="5", guide=images[:2])
    net.train()
    try:
        with pytest.raises(th.RecipeError, match=r"training mode, where '1' \(BatchNorm2d\) would update.*\n.*eval"):
            recipes.pgd(net, images, labels)
    finally:
        net.eval()


def test_a_result_prints_and_draws_itself(net, some):
    images, labels = some
    found = recipes.pgd(net, images, labels, eps=0.1)
    assert repr(found).startswith("pgd (norm inf, eps 0.1, steps 10")
    assert "accuracy" in repr(found)
    figure = found.show(4)
    assert len(figure.axes) == 12
    recipes.fgsm(nn.Linear(5, 2), torch.rand(3, 5), torch.tensor([0, 1, 0])).show()
