"""Attacks beside torchattacks: same net, same images, same settings."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import tenterhook as th

pytestmark = pytest.mark.references


@pytest.fixture(scope="module")
def torchattacks():
    import torchattacks

    return torchattacks


@pytest.fixture(scope="module")
def case():
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    images = images * 0.5 + 0.25  # Away from black and white, so that DeepFool is compared where nothing is clamped.
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    ).eval()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        batch = torch.randint(0, 1500, (128,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return model, images[1500:1564], labels[1500:1564]


def agree(found, theirs, atol=1e-6):
    torch.testing.assert_close(found.examples, theirs, atol=atol, rtol=0)
    return found


def test_fgsm(torchattacks, case):
    model, images, labels = case
    found = agree(th.recipes.fgsm(model, images, labels, eps=0.1), torchattacks.FGSM(model, eps=0.1)(images, labels))
    assert found.rate > 0.1


def test_bim(torchattacks, case):
    model, images, labels = case
    theirs = torchattacks.BIM(model, eps=0.1, alpha=0.02, steps=8)(images, labels)
    agree(th.recipes.bim(model, images, labels, eps=0.1, step=0.02, steps=8), theirs)


def test_pgd(torchattacks, case):
    model, images, labels = case
    theirs = torchattacks.PGD(model, eps=0.1, alpha=0.02, steps=8, random_start=False)(images, labels)
    agree(th.recipes.pgd(model, images, labels, eps=0.1, step=0.02, steps=8, start="image"), theirs)


def test_pgd_at_a_class(torchattacks, case):
    model, images, labels = case
    aim = (labels + 3) % 10
    attack = torchattacks.PGD(model, eps=0.2, alpha=0.02, steps=15, random_start=False)
    attack.set_mode_targeted_by_label(quiet=True)
    found = th.recipes.pgd(model, images, labels, eps=0.2, step=0.02, steps=15, start="image", target=aim)
    agree(found, attack(images, aim))
    assert torch.equal(found.success, model(found.examples).argmax(1) == aim)


def test_pgd_in_l2(torchattacks, case):
    model, images, labels = case
    theirs = torchattacks.PGDL2(model, eps=0.5, alpha=0.1, steps=10, random_start=False)(images, labels)
    agree(th.recipes.pgd(model, images, labels, eps=0.5, step=0.1, steps=10, norm=2, start="image"), theirs, atol=2e-5)


def test_deepfool(torchattacks, case):
    model, images, labels = case
    theirs = torchattacks.DeepFool(model, steps=50, overshoot=0.02)(images, labels)
    found = agree(th.recipes.deepfool(model, images, labels), theirs, atol=2e-5)
    assert found.success.all()


def test_a_random_start_is_as_strong_as_theirs(torchattacks, case):
    model, images, labels = case
    theirs = torchattacks.PGD(model, eps=0.1, alpha=0.025, steps=10)(images, labels)
    their_rate = float((model(theirs).argmax(1) != labels).float().mean())
    found = th.recipes.pgd(model, images, labels, eps=0.1, steps=10)
    assert found.rate >= their_rate - 0.05


def test_their_budget_is_left_by_rounding_and_ours_is_not(torchattacks, case):
    """In exact arithmetic: a change of float32 numbers is exact in float64."""
    model, images, labels = case
    images = images * 0.97 + 0.011  # The digits have sixteenths, which are never rounded.
    theirs = torchattacks.PGD(model, eps=8 / 255, alpha=0.01, steps=10)(images, labels)
    ours = th.recipes.pgd(model, images, labels, eps=8 / 255, step=0.01, steps=10).examples
    assert float((theirs.double() - images.double()).abs().max()) > 8 / 255
    assert float((ours.double() - images.double()).abs().max()) <= 8 / 255
