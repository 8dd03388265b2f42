"""Parser for ``--input``: files, images, text, and random values of given shapes."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook._tree import map_tensors
from tenterhook.cli.errors import CommandError, Unreadable, missing_package, speaking
from tenterhook.cli.limits import check_archive, check_array, check_bytes, check_file
from tenterhook.cli.models import tokenizer_of, torch_file

__all__ = ["FORMS", "Inputs", "read_inputs"]

FORMS = """An input is one of
  1x3x224x224             random normal values of that shape
  int:1x16<128            random integers below 128; also uniform:, zeros:, ones:, bool:
  file.npy .npz .pt .safetensors
  picture.png             an image, as [1, channels, height, width] from 0 to 1
  text:Hello there        a text, tokenized with the model's tokenizer or --tokenizer DIR
and name=INPUT passes it by keyword: --input "input_ids=int:1x16<128\""""

SHAPE = re.compile(r"(?:(?P<kind>[a-z]+):)?(?P<shape>[0-9]+(?:x[0-9]+)*|scalar)(?:<(?P<below>[0-9]+))?")
KEYWORD = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<rest>.*)", re.DOTALL)
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
LARGEST_INTEGER = 2**63
LARGEST = 2**34  # values; a typing error must not fill the memory

RANDOM: dict[str, Callable[[tuple[int, ...], int], Tensor]] = {
    "float": lambda shape, _: torch.randn(shape),
    "uniform": lambda shape, _: torch.rand(shape),
    "zeros": lambda shape, _: torch.zeros(shape),
    "ones": lambda shape, _: torch.ones(shape),
    "bool": lambda shape, _: torch.rand(shape) < 0.5,  # noqa: PLR2004  # half of them are True
    "int": lambda shape, below: torch.randint(below, shape),
}


@dataclass
class Inputs:
    """The arguments for one call of the model, and the tokens of a text input."""

    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)

    def to(self, device: str | None, dtype: torch.dtype | None) -> Inputs:
        """Return a copy on another device, with floating-point tensors in another dtype."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        args, kwargs = map_tensors(moved, (self.args, self.kwargs))
        return Inputs(list(args), kwargs, self.tokens)

    @property
    def whole(self) -> Any:
        """The inputs in the form that ``th.points`` and ``th.audit`` take."""
        if self.args and self.kwargs:
            raise CommandError("give the inputs either all by keyword (name=INPUT) or none of them.")
        return self.kwargs or tuple(self.args)

    def needing_gradients(self) -> Inputs:
        """Return a copy whose floating-point tensors require gradients.

        The model's own input is a point too, and ``--grad`` records its gradient.
        """

        def asked(tensor: Tensor) -> Tensor:
            return tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor

        args, kwargs = map_tensors(asked, (self.args, self.kwargs))
        return Inputs(list(args), kwargs, self.tokens)

    def __bool__(self) -> bool:
        return bool(self.args or self.kwargs)


def read_inputs(
    texts: tuple[str, ...], model: nn.Module, *, folder: Path | None = None, image_size: tuple[int, int] | None = None
) -> Inputs:
    """Parse every ``--input``.

    ``folder`` is the directory to load a tokenizer from. ``image_size`` is the size that images are resized to.
    """
    made = Inputs()
    for text in texts:
        keyword = KEYWORD.fullmatch(text)
        name, rest = (keyword["name"], keyword["rest"]) if keyword else (None, text)
        _put(made, name, _read(rest, made, model, folder, image_size))
    return made


def _put(made: Inputs, name: str | None, value: Any) -> None:
    if name is not None:
        made.kwargs[name] = value
    elif isinstance(value, dict):
        made.kwargs.update(value)
    elif isinstance(value, tuple):
        made.args.extend(value)
    else:
        made.args.append(value)


def _read(text: str, made: Inputs, model: nn.Module, folder: Path | None, size: tuple[int, int] | None) -> Any:
    shape = SHAPE.fullmatch(text)
    if shape:
        return _random(text, shape)
    if text.startswith("text:"):
        return _text(text.removeprefix("text:"), made, folder)
    file = Path(text)
    if not file.is_file():
        raise CommandError(f"{text!r} is not an input: there is no such file, and it is not a shape.\n{FORMS}")
    if file.suffix.lower() in IMAGES:
        return _image(file, model, size)
    read = READERS.get(file.suffix.lower())
    if read is None:
        raise CommandError(
            f"{file}: inputs are read from {', '.join(READERS)} and from images, not from {file.suffix!r}."
        )
    with speaking(f"{file} could not be read", kind=Unreadable):
        return read(file)


def _random(text: str, found: re.Match[str]) -> Tensor:
    kind, below = found["kind"] or "float", found["below"]
    if kind not in RANDOM:
        raise CommandError(f"{text!r}: {kind!r} is not a kind of random values; the kinds are {', '.join(RANDOM)}.")
    if (kind == "int") != (below is not None):
        raise CommandError(f"{text!r}: int:, and only int:, needs an upper bound: int:1x16<128 gives 0 to 127.")
    shape = () if found["shape"] == "scalar" else tuple(map(int, found["shape"].split("x")))
    if (count := math.prod(shape)) > LARGEST:
        raise CommandError(f"{text!r} has {count:,} values; the limit is {LARGEST:,}.")
    check_bytes(f"{text!r} takes", count * (8 if kind == "int" else 4), "Give a smaller shape.")
    if int(below or 0) >= LARGEST_INTEGER:
        raise CommandError(f"{text!r}: the upper bound must be below {LARGEST_INTEGER:,}.")
    if below == "0":
        raise CommandError(f"{text!r}: the upper bound must be 1 or more.")
    return RANDOM[kind](shape, int(below or 0))


# -- files ------------------------------------------------------------------------------------------------------------


def _numpy(file: Path) -> Any:
    import numpy as np

    check_file(file, "Give a part of it.")
    (check_archive if file.suffix.lower() == ".npz" else check_array)(file)
    found = np.load(file, allow_pickle=False)
    if isinstance(found, np.ndarray):
        return torch.from_numpy(found)
    with found:
        return {name: torch.from_numpy(found[name]) for name in found.files}


def _torch(file: Path) -> Any:
    found = torch_file(file, "could not be read")
    return tuple(found) if isinstance(found, list) else found


def _safetensors(file: Path) -> Any:
    from safetensors.torch import load_file

    check_file(file, "Give a part of it.")
    return load_file(file)


READERS: dict[str, Callable[[Path], Any]] = {
    ".npy": _numpy,
    ".npz": _numpy,
    ".pt": _torch,
    ".pth": _torch,
    ".safetensors": _safetensors,
}


def _image(file: Path, model: nn.Module, size: tuple[int, int] | None) -> Tensor:
    try:
        from PIL import Image
    except ImportError:
        raise missing_package("pillow", "page") from None
    import numpy as np

    with (
        warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
        speaking(f"{file} could not be read as an image", kind=Unreadable),
        Image.open(file) as opened,
    ):
        image = opened.convert(MODES.get(_channels(model), "RGB"))
        if size is not None:
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).float() / 255
    return (pixels.unsqueeze(-1) if pixels.dim() == len(("row", "column")) else pixels).permute(2, 0, 1).unsqueeze(0)


def _channels(model: nn.Module) -> int:
    """Return the number of input channels of the model's first convolution, or 3."""
    found = (module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d))
    return next(found, 3)


def _text(text: str, made: Inputs, folder: Path | None) -> dict[str, Tensor]:
    if folder is None:
        raise CommandError("a text needs a tokenizer: use a model directory that has one, or --tokenizer DIR.")
    tokenizer = tokenizer_of(folder)
    with speaking("the tokenizer failed"):
        found = dict(tokenizer(text, return_tensors="pt"))
        made.tokens = [tokenizer.decode([token]) for token in found["input_ids"][0].tolist()]
    if not made.tokens:
        raise CommandError(f"the text {text!r} has no tokens; the model needs at least one.")
    return found
