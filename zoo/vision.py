"""timm and torchvision: every family, the smallest member of each first."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import torch

from zoo.case import Case, NotRunnable

__all__ = ["build_timm", "build_torchvision", "prepare_torchvision", "timm_names", "torchvision_names"]

MOST = 30_000_000
"""Maximum number of parameters. Larger models are skipped."""
SIZES = (64, 96, 128, 224, 256)


def timm_names() -> Iterator[tuple[str, str]]:
    """Yield each name with its family, in rounds: one of every family first, then the second ones."""
    timm = _load("timm")
    families = {family: _by_size(timm.list_models(module=family)) for family in timm.list_modules()}
    for turn in range(max(map(len, families.values()), default=0)):
        yield from ((members[turn], family) for family, members in families.items() if turn < len(members))


SMALL = ("test", "atto", "femto", "pico", "nano", "micro", "mini", "xxs", "xxt", "tiny", "xs", "_t_", "small", "_s_")


def _by_size(names: list[str]) -> list[str]:
    def rank(name: str) -> tuple[int, int, str]:
        small = next((place for place, word in enumerate(SMALL) if word in f"{name}_"), len(SMALL))
        return small, sum(map(int, re.findall(r"\d+", name)[:1])), name

    return sorted(names, key=rank)


def build_timm(name: str) -> Case:
    """Return a case with the smallest image that the model accepts."""
    timm = _load("timm")
    _refuse_large(lambda: timm.create_model(name))
    torch.manual_seed(0)
    return _fitting(lambda side: _timm_model(timm, name, side))


def _timm_model(timm: Any, name: str, side: int) -> tuple[Any, tuple[int, ...]]:
    try:
        model = timm.create_model(name, num_classes=10, img_size=side)
    except TypeError:  # It accepts any size and has no argument for it.
        model = timm.create_model(name, num_classes=10)
    config = model.default_cfg
    side = config["input_size"][1] if config.get("fixed_input_size") and "img_size" not in config else side
    return model, (config["input_size"][0], side, side)


def torchvision_names() -> Iterator[tuple[str, str]]:
    """Yield each name with its family."""
    models = _torchvision()
    for name in models.list_models():
        yield name, re.match(r"[a-z]+", name)[0]  # type: ignore[index]


def build_torchvision(name: str) -> Case:
    """Return a case with the smallest image or clip that the model accepts."""
    models = _torchvision()
    _refuse_large(lambda: _without_weights(models, name))
    torch.manual_seed(0)
    return _fitting(lambda side: (_without_weights(models, name), (3, side, side)))


def _refuse_large(make: Any) -> None:
    try:
        with torch.device("meta"):
            model = make()
    except NotImplementedError:  # It computes with values that the meta device does not have.
        model = make()
    if sum(parameter.numel() for parameter in model.parameters()) > MOST:
        raise NotRunnable(f"too large: more than {MOST:,} parameters")


def _without_weights(models: Any, name: str) -> Any:
    kwargs = {"weights_backbone": None} if _has_backbone(models, name) else {}
    return models.get_model(name, weights=None, **kwargs)


def _has_backbone(models: Any, name: str) -> bool:
    return any(part in models.get_model_builder(name).__module__ for part in ("detection", "segmentation"))


def _fitting(make: Any) -> Case:
    """Return a case for the first size that the model accepts."""
    reason = ""
    for side in SIZES:
        try:
            model, shape = make(side)
            model.eval()
            for image in _images(model, shape):
                with torch.no_grad():
                    model(image)
                return Case(model, (image,))
        except Exception as error:  # noqa: BLE001 - a model may fail in any way at a size that is not its own
            reason = f"{type(error).__name__}: {error}"
    raise NotRunnable(f"does not run: {reason}")


def _images(model: Any, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if ".video" in type(model).__module__:
        yield torch.randn(1, shape[0], 16, *shape[1:], generator=generator)
    elif ".optical_flow" in type(model).__module__:
        raise NotRunnable("takes two images")
    else:
        yield torch.randn(1, *shape, generator=generator)


def _load(package: str) -> Any:
    if importlib.util.find_spec(package) is None:
        raise NotRunnable(f"{package} is not installed")
    return importlib.import_module(package)


def _torchvision() -> Any:
    if not prepare_torchvision():
        raise NotRunnable("torchvision is not installed")
    return importlib.import_module("torchvision.models")


def prepare_torchvision() -> bool:
    """Make torchvision importable even if its binary library does not fit this torch.

    Return False if it is not installed.

    Missing operators are declared without an implementation, because the models call none of them.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return False
    if not hasattr(torch.ops.torchvision, "nms"):
        text = (pathlib.Path(found.origin).parent / "_meta_registrations.py").read_text(encoding="utf-8")
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in re.findall(r'register_fake\("torchvision::(\w+)"\)', text):
            library.define(f"{name}(Tensor x) -> Tensor")
        _KEPT.append(library)
    return True


_KEPT: list[Any] = []  # Deleting a library would remove its operators.
