"""TensorBoard: the values and gradients on a tape, as histograms, scalars and images.

``Sampled(model, "*", every=100, then=TapeWriter(writer))`` writes them during training.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

import tenterhook as th
from tenterhook._tree import show_path, tensors

__all__ = ["TapeWriter", "TensorBoard", "write_tape"]

TAG = re.compile(r"[^\w./#-]+")
MAPS = 16  # channels drawn for each value


class TapeWriter:
    """A callable ``(step, tape)`` that writes each tape to a ``SummaryWriter``."""

    def __init__(self, writer: Any, *, histograms: bool = True, images: bool = False) -> None:
        self.writer, self.histograms, self.images = writer, histograms, images

    def __call__(self, step: int, tape: th.Tape) -> None:
        write_tape(self.writer, tape, step, histograms=self.histograms, images=self.images)


TensorBoard = TapeWriter  # The documented name until now; ``th.TensorBoard`` is another class.


def write_tape(writer: Any, tape: th.Tape, step: int, *, histograms: bool = True, images: bool = False) -> None:
    """Write the values and gradients of a tape: histograms, root mean squares, and counts of non-finite elements.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``.
        tape: the tape.
        step: the global step.
        histograms: write histograms; scalars alone are small.
        images: write the maps of the first example, for values of ``[batch, channels, height, width]``.
    """
    for kind, view in (("value", tape), ("grad", tape.grad)):
        for address in view:
            for path, tensor in tensors(view[address]):
                if tensor.is_floating_point() and tensor.numel():
                    tag = TAG.sub("_", f"{kind}/{address}{show_path(path)}").rstrip("_")
                    _write(writer, tag, tensor.detach().float().cpu(), step, histograms=histograms, images=images)


def _write(writer: Any, tag: str, value: Tensor, step: int, *, histograms: bool, images: bool) -> None:
    finite = value[value.isfinite()]
    if len(finite) < value.numel():
        writer.add_scalar(f"{tag}/not finite", value.numel() - len(finite), step)
    if not len(finite):
        return
    writer.add_scalar(f"{tag}/rms", float(finite.square().mean().sqrt()), step)
    if histograms:
        writer.add_histogram(tag, finite, step)
    if images and value.dim() == 4:  # noqa: PLR2004
        writer.add_image(f"{tag}/maps", _sheet(value[0, :MAPS]), step)


def _sheet(maps: Tensor) -> Tensor:
    """Return maps side by side, each scaled separately: ``[1, height, all widths]``."""
    maps = maps.nan_to_num()
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    scaled = (maps - low) / (high - low).clamp_min(1e-12)
    return torch.cat([torch.nn.functional.pad(each, (0, 1)) for each in scaled], 1)[None]
