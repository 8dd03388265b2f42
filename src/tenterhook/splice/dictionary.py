"""A dictionary of features: a sparse autoencoder or a transcoder with the usual activations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from tenterhook.errors import SpliceError

__all__ = ["Dictionary", "Kind", "top"]

Kind = Literal["relu", "topk", "batchtopk", "jumprelu", "gated"]


class Dictionary(nn.Module):
    """A sparse autoencoder, or with another ``out`` a transcoder.

    >>> import torch, tenterhook as th
    >>> sae = th.Dictionary(8, 32, kind="topk", k=4)
    >>> latents = sae.encode(torch.randn(5, 8))
    >>> latents.shape, int((latents != 0).sum(-1).max()), sae.decode(latents).shape
    (torch.Size([5, 32]), 4, torch.Size([5, 8]))

    Args:
        size: the size of the values that it encodes.
        width: the number of latents.
        kind: the activation: ``"relu"``, ``"topk"`` (the ``k`` largest of each row), ``"batchtopk"`` (in training the
            ``k`` largest per row of the whole batch, otherwise those above ``threshold``), ``"jumprelu"`` (those above
            a threshold for each latent) or ``"gated"``.
        k: the number of active latents in each row, for ``"topk"`` and ``"batchtopk"``.
        out: the size of the values that it reconstructs; by default ``size``.
        center: whether ``b_dec`` is subtracted from the input. Not for a transcoder.
        skip: whether it has a linear path ``W_skip`` from the input to the output, as some transcoders have.

    The parameters have the names and shapes that SAELens uses: ``W_enc`` is ``[size, width]``, and ``W_dec`` is
    ``[width, out]``. Row ``W_dec[712]`` is the direction that latent 712 writes.
    """

    W_enc: nn.Parameter
    W_dec: nn.Parameter
    b_dec: nn.Parameter
    b_enc: Tensor
    b_gate: Tensor
    b_mag: Tensor
    r_mag: Tensor
    threshold: Tensor

    def __init__(
        self,
        size: int,
        width: int,
        *,
        kind: Kind = "relu",
        k: int | None = None,
        out: int | None = None,
        center: bool = False,
        skip: bool = False,
    ) -> None:
        super().__init__()
        out = size if out is None else out
        _check_sizes(size=size, width=width, out=out)
        _check_kind(kind, k, width)
        if center and out != size:
            raise SpliceError(f"center=True needs an output of the input's size; got {size} and {out}")
        self.kind, self.k, self.center = kind, k, center
        self.notes: dict[str, Any] = {}
        directions = nn.functional.normalize(torch.randn(width, out), dim=1)
        encoder = directions.T.clone() if out == size else torch.randn(size, width) / size**0.5
        self.W_enc, self.W_dec = nn.Parameter(encoder), nn.Parameter(directions)
        self.b_dec = nn.Parameter(torch.zeros(out))
        for name in ("b_gate", "b_mag", "r_mag") if kind == "gated" else ("b_enc",):
            self.register_parameter(name, nn.Parameter(torch.zeros(width)))
        if kind == "jumprelu":
            self.threshold = nn.Parameter(torch.zeros(width))
        elif kind == "batchtopk":
            self.register_buffer("threshold", torch.zeros(()))
        if skip:
            self.W_skip = nn.Parameter(torch.zeros(out, size))

    @property
    def size(self) -> int:
        """The size of the values that it encodes."""
        return self.W_enc.shape[0]

    @property
    def width(self) -> int:
        """The number of latents."""
        return self.W_enc.shape[1]

    @property
    def out(self) -> int:
        """The size of the values that it reconstructs."""
        return self.W_dec.shape[1]

    def preactivations(self, value: Tensor) -> Tensor:
        """Return the latents before the activation, ``[..., width]``."""
        value = value - self.b_dec if self.center else value
        return value @ self.W_enc + (self.b_gate if self.kind == "gated" else self.b_enc)

    def encode(self, value: Tensor) -> Tensor:
        """Return the latents of a value, ``[..., width]``."""
        return self.activated(self.preactivations(value))

    def activated(self, before: Tensor) -> Tensor:
        """Return the latents, given their preactivations."""
        if self.kind == "topk":
            return top(before, cast("int", self.k)).relu()
        if self.kind == "batchtopk" and self.training:
            flat = before.reshape(1, -1)
            return top(flat, cast("int", self.k) * (before.numel() // self.width)).relu().reshape(before.shape)
        if self.kind in ("jumprelu", "batchtopk"):
            return before.relu() * (before > self.threshold).to(before.dtype)
        if self.kind == "gated":
            return (before > 0).to(before.dtype) * ((before - self.b_gate) * self.r_mag.exp() + self.b_mag).relu()
        return before.relu()

    def decode(self, latents: Tensor) -> Tensor:
        """Return the value that latents stand for, ``[..., out]``."""
        return latents.to(self.W_dec.dtype) @ self.W_dec + self.b_dec

    def skip(self, value: Tensor) -> Tensor | None:
        """Return the part of the output that does not go through the latents, or None."""
        return value @ self.W_skip.T if hasattr(self, "W_skip") else None

    def forward(self, value: Tensor) -> Tensor:
        """Return the reconstruction of a value."""
        found, past = self.decode(self.encode(value)), self.skip(value)
        return found if past is None else found + past

    def save(self, folder: str | os.PathLike[str], *, notes: Mapping[str, Any] | None = None) -> None:
        """Write the dictionary in the layout of SAELens: ``cfg.json`` and ``sae_weights.safetensors``.

        ``notes`` are plain JSON values; they become the metadata in ``cfg.json``.
        """
        from tenterhook.splice.dictionary_files import save

        save(self, folder, notes or {})

    def extra_repr(self) -> str:
        """Return the sizes and the kind."""
        k = f", k={self.k}" if self.k is not None else ""
        out = f", out={self.out}" if self.out != self.size else ""
        return f"{self.size}, {self.width}, kind={self.kind!r}{k}{out}"


def _check_sizes(**sizes: Any) -> None:
    for name, given in sizes.items():
        if type(given) is not int or given < 1:
            raise SpliceError(f"{name} is a positive int; got {given!r:.40}")


def _check_kind(kind: Any, k: Any, width: int) -> None:
    if kind not in get_args(Kind):
        raise SpliceError(f"kind= is one of {', '.join(map(repr, get_args(Kind)))}; got {kind!r:.40}")
    if kind not in ("topk", "batchtopk") and k is not None:
        raise SpliceError(f"k= is for kind='topk' and kind='batchtopk'; got k={k!r:.40} with kind={kind!r}")
    if kind in ("topk", "batchtopk") and (type(k) is not int or not 0 < k <= width):
        raise SpliceError(f"kind={kind!r} needs k=, the number of active latents, from 1 to {width}; got {k!r:.40}")


def top(values: Tensor, count: int) -> Tensor:
    """Return the values with all but the ``count`` largest of each row set to zero."""
    found = values.topk(count, dim=-1, sorted=False)
    return torch.zeros_like(values).scatter(-1, found.indices, found.values)
