"""Attribution, against captum on the same work; captum is in the environment that ``make references`` makes.

Score-CAM is not in captum. There the other way is the method as it is usually written: one run for each mask.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from captum import attr
from torch import Tensor, nn
from torch.nn import functional as F

import tenterhook as th
from benchmarks.harness import Goal, Row, Workload, always, measure
from benchmarks.resnet import ResNet18

SIDE, TARGET = 64, 5
SAME, FASTER = Goal("ratio", at_most=1.05), Goal("ratio", at_most=1 / 3)
FEW = 4  # rounds of what takes a second or more
R = th.recipes

Find = Callable[[], Tensor]


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    warnings.simplefilter("ignore")  # captum warns at each call of what it does to the input and the model.
    torch.manual_seed(0)
    resnet, stack = ResNet18(100).eval(), Stack().eval()
    images = torch.randn(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    for name, theirs, ours in gradients(resnet, stack, images):
        yield from measure(work(name, theirs, ours, SAME), max(2, rounds // 3))
    for name, theirs, ours in sweeps(resnet, images[:1]):
        yield from measure(work(name, theirs, ours, FASTER), min(rounds, FEW))


class Stack(nn.Module):
    """Convolutions and ReLUs, each module used once and none in place: all that captum's rules can follow."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 32, 64, 64]
        layers: list[nn.Module] = []
        for number in range(4):
            layers += [nn.Conv2d(widths[number], widths[number + 1], 3, padding=1), nn.ReLU()]
            layers += [nn.AvgPool2d(2)] if number % 2 else []
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64 * (SIDE // 4) ** 2, 100)

    def forward(self, images: Tensor) -> Tensor:
        """The scores of the classes."""
        return self.head(torch.flatten(self.body(images), 1))


def work(name: str, theirs: Find, ours: Find, goal: Goal) -> Workload:
    """One attribution, in two ways."""
    found: dict[str, Tensor] = {}

    def kept(find: Find) -> Callable[[], None]:
        def call() -> None:
            found["attribution"] = find().detach()

        return call

    other = "by hand" if name.startswith("Score-CAM") else "captum"
    return Workload(
        name=name,
        ways={other: always(kept(theirs), lambda: found), "tenterhook": always(kept(ours), lambda: found)},
        reference=other,
        goals={"tenterhook": goal},
        calls=2,
        tolerance=1e-4,
    )


def gradients(resnet: Any, stack: Any, x: Tensor) -> Iterator[tuple[str, Find, Find]]:
    """What takes as many passes in both."""
    one, last = x[:1], resnet.layer4
    yield "saliency", lambda: attr.Saliency(resnet).attribute(x, TARGET), lambda: at(R.saliency, resnet, x)
    yield (
        "input × gradient",
        lambda: attr.InputXGradient(resnet).attribute(x, TARGET),
        lambda: at(R.input_x_gradient, resnet, x),
    )
    yield (
        "integrated gradients, 20 steps, with its check",
        lambda: attr.IntegratedGradients(resnet).attribute(
            one, target=TARGET, n_steps=20, return_convergence_delta=True
        )[0],
        lambda: at(R.integrated_gradients, resnet, one, steps=20),
    )
    yield (
        "SmoothGrad, 20 samples",
        lambda: seeded(attr.NoiseTunnel(attr.Saliency(resnet)).attribute, one, nt_samples=20,
                       stdevs=0.15 * float(one.max() - one.min()), target=TARGET, abs=False),
        lambda: at(R.smoothgrad, resnet, one, samples=20),
    )  # fmt: skip
    yield (
        "Grad-CAM",
        lambda: attr.LayerGradCam(resnet, last).attribute(x, TARGET, relu_attributions=True)[:, 0],
        lambda: at(R.gradcam, resnet, x, point="layer4"),
    )
    yield (
        "layer integrated gradients, 20 steps, with its check",
        lambda: attr.LayerIntegratedGradients(resnet, resnet.layer2).attribute(
            one, target=TARGET, n_steps=20, return_convergence_delta=True
        )[0],
        lambda: at(R.layer_integrated_gradients, resnet, one, point="layer2", steps=20),
    )
    yield (
        "conductance, 20 steps, with its check",
        lambda: attr.LayerConductance(resnet, resnet.layer2).attribute(
            one, target=TARGET, n_steps=20, return_convergence_delta=True
        )[0],
        lambda: at(R.conductance, resnet, one, point="layer2", steps=20),
    )
    yield (
        "guided backprop",
        lambda: attr.GuidedBackprop(stack).attribute(x, TARGET),
        lambda: at(R.guided_backprop, stack, x),
    )
    yield "deconvnet", lambda: attr.Deconvolution(stack).attribute(x, TARGET), lambda: at(R.deconvnet, stack, x)
    yield (
        "guided Grad-CAM",
        lambda: attr.GuidedGradCam(stack, stack.body[5]).attribute(x, TARGET, interpolate_mode="bilinear"),
        lambda: at(R.guided_gradcam, stack, x, point="body.5"),
    )
    yield (
        "DeepLIFT, with its check",
        lambda: attr.DeepLift(stack).attribute(x, x * 0, TARGET, return_convergence_delta=True)[0],
        lambda: at(R.deeplift, stack, x),
    )
    yield (
        "LRP, epsilon",
        lambda: attr.LRP(stack).attribute(x, TARGET),
        lambda: at(R.lrp, stack, x, epsilon=1e-9),
    )


def sweeps(model: Any, image: Tensor) -> Iterator[tuple[str, Find, Find]]:
    """What runs the model many times on one image."""
    segments = torch.arange(64).reshape(8, 8).repeat_interleave(8, 0).repeat_interleave(8, 1)
    channels = torch.arange(512).reshape(1, 512, 1, 1)
    yield (
        "occlusion, 225 windows",
        lambda: attr.Occlusion(model).attribute(image, (3, 8, 8), (3, 4, 4), target=TARGET),
        lambda: at(R.occlusion, model, image, window=8, stride=4),
    )
    yield (
        "feature ablation, 64 segments",
        lambda: attr.FeatureAblation(model).attribute(image, target=TARGET, feature_mask=segments[None, None]),
        lambda: at(R.feature_ablation, model, image, mask=segments),
    )
    yield (
        "channel ablation, 512 channels of the last stage",
        lambda: attr.LayerFeatureAblation(model, model.layer4[0]).attribute(image, target=TARGET, layer_mask=channels)[
            :, :, 0, 0
        ],
        lambda: at(R.channel_ablation, model, image, point="layer4.0"),
    )
    yield (
        "Score-CAM, 512 masks",
        lambda: scorecam_by_hand(model, image),
        lambda: at(R.scorecam, model, image, point="layer4"),
    )


def at(recipe: Any, model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """One of ours."""
    return recipe(model, x, target=TARGET, **options).attribution  # type: ignore[no-any-return]


def seeded(attribute: Any, *args: Any, **options: Any) -> Tensor:
    """One of captum's that draws from torch's own generator."""
    torch.manual_seed(0)
    return attribute(*args, **options)  # type: ignore[no-any-return]


@torch.no_grad()
def scorecam_by_hand(model: Any, image: Tensor) -> Tensor:
    """As it is usually written: a hook, and a run for each channel."""
    kept: list[Tensor] = []
    handle = model.layer4.register_forward_hook(lambda _m, _a, out: kept.append(out))
    model(image)
    handle.remove()
    maps = kept[0]
    scores = []
    for channel in range(maps.shape[1]):
        mask = F.interpolate(maps[:, channel : channel + 1], image.shape[2:], mode="bilinear")
        low, high = mask.min(), mask.max()
        mask = (mask - low) / (high - low) if high > low else mask * 0
        scores.append(model(image * mask)[0, TARGET])
    weights = torch.stack(scores).softmax(0)
    return (weights[:, None, None] * maps[0]).sum(0).relu()[None]
