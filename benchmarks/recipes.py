"""Attribution, compared with captum on the same work. captum is in the environment of ``make references``.

Score-CAM is not in captum. It is compared with the usual implementation: one run for each mask. Methods with many runs
are also shown for captum with several perturbations at once, an option of captum.

The clock counts only this thread, so that other programs do not matter.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
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
MOST, FEW = 6, 2  # rounds, and rounds for work of a second or more
AT_ONCE = 32
R = th.recipes

Find = Callable[[], Tensor]


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    warnings.simplefilter("ignore")  # captum warns at each call about its changes to the input and the model.
    torch.manual_seed(0)
    resnet, stack = ResNet18(100).eval(), Stack().eval()
    images = torch.randn(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    for name, theirs, ours in gradients(resnet, stack, images):
        yield from measure(work(name, {"captum": theirs, "tenterhook": ours}, SAME), min(rounds, MOST))
    for name, ways in sweeps(resnet, images[:1]):
        yield from measure(work(name, ways, FASTER), min(rounds, FEW))


class Stack(nn.Module):
    """Convolutions and ReLUs, each module used once and none in place, because captum's rules support only these."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 32, 64, 64]
        layers: list[nn.Module] = []
        for number in range(4):
            layers += [nn.Conv2d(widths[number], widths[number + 1], 3, padding=1), nn.ReLU()]
            layers += [nn.AvgPool2d(2)] if number % 2 else []
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64 * (SIDE // 4) ** 2, 100)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        return self.head(torch.flatten(self.body(images), 1))


def work(name: str, ways: Mapping[str, Find], goal: Goal) -> Workload:
    """Return the workload of one attribution, done in several ways."""
    found: dict[str, Tensor] = {}

    def kept(find: Find) -> Callable[[], None]:
        def call() -> None:
            found["attribution"] = find().detach()

        return call

    return Workload(
        name=name,
        ways={who: always(kept(find), lambda: found) for who, find in ways.items()},
        reference=next(iter(ways)),
        goals={"tenterhook": goal},
        calls=2,
        tolerance=1e-4,
        clock=time.thread_time,
    )


def gradients(resnet: Any, stack: Any, x: Tensor) -> Iterator[tuple[str, Find, Find]]:
    """Yield methods that need the same number of passes in both libraries."""
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


def sweeps(model: Any, image: Tensor) -> Iterator[tuple[str, dict[str, Find]]]:
    """Yield methods that run the model many times on one image."""
    segments = torch.arange(64).reshape(8, 8).repeat_interleave(8, 0).repeat_interleave(8, 1)
    channels = torch.arange(128).reshape(1, 128, 1, 1)
    occlusion, features = attr.Occlusion(model), attr.FeatureAblation(model)
    layer = attr.LayerFeatureAblation(model, model.layer2)

    def ways(captums: Any, ours: Find, **options: Any) -> dict[str, Find]:
        def theirs(count: int) -> Find:
            return lambda: captums(image, target=TARGET, perturbations_per_eval=count, **options)

        return {"captum": theirs(1), f"captum, {AT_ONCE} at once": theirs(AT_ONCE), "tenterhook": ours}

    yield (
        "occlusion, 81 windows",
        ways(
            occlusion.attribute,
            lambda: at(R.occlusion, model, image, window=16, stride=6),
            sliding_window_shapes=(3, 16, 16),
            strides=(3, 6, 6),
        ),
    )
    yield (
        "feature ablation, 64 segments",
        ways(
            features.attribute,
            lambda: at(R.feature_ablation, model, image, mask=segments),
            feature_mask=segments[None, None],
        ),
    )
    yield (
        "channel ablation, the 128 channels of the second stage",
        ways(
            lambda *args, **options: layer.attribute(*args, **options)[:, :, 0, 0],
            lambda: at(R.channel_ablation, model, image, point="layer2"),
            layer_mask=channels,
        ),
    )
    yield (
        "Score-CAM, the 128 masks of the second stage",
        {
            "by hand": lambda: scorecam_by_hand(model, image, 1),
            f"by hand, {AT_ONCE} at once": lambda: scorecam_by_hand(model, image, AT_ONCE),
            "tenterhook": lambda: at(R.scorecam, model, image, point="layer2"),
        },
    )


def at(recipe: Any, model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """Return the attribution of one of our recipes."""
    return recipe(model, x, target=TARGET, **options).attribution  # type: ignore[no-any-return]


def seeded(attribute: Any, *args: Any, **options: Any) -> Tensor:
    """Return the attribution of a captum method that uses torch's random generator."""
    torch.manual_seed(0)
    return attribute(*args, **options)  # type: ignore[no-any-return]


@torch.no_grad()
def scorecam_by_hand(model: Any, image: Tensor, at_once: int) -> Tensor:
    """Compute Score-CAM in the usual way: a hook, and a run for each channel."""
    kept: list[Tensor] = []
    handle = model.layer2.register_forward_hook(lambda _m, _a, out: kept.append(out))
    model(image)
    handle.remove()
    maps = kept[0]
    scores = []
    for some in maps[0].split(at_once):
        masks = F.interpolate(some[:, None], image.shape[2:], mode="bilinear")
        low, high = masks.amin((2, 3), keepdim=True), masks.amax((2, 3), keepdim=True)
        masks = (masks - low) / torch.where(high > low, high - low, 1)
        scores.append(model(image * masks)[:, TARGET])
    weights = torch.cat(scores).softmax(0)
    return (weights[:, None, None] * maps[0]).sum(0).relu()[None]
