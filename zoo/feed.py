"""Inputs for models of unknown kind: by modality, and by the argument names of their ``forward``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["feeds"]

BATCH, TOKENS, FRAMES = 2, 7, 32
LARGEST, LONGEST = 256, 16  # side of an image, frames of a clip
Feed = dict[str, Any]


def feeds(model: nn.Module, config: Any) -> Iterator[Feed]:
    """Yield keyword arguments to try, the likeliest first."""
    parameters = inspect.signature(model.forward).parameters
    maker = _Maker(model, config)
    main = getattr(model, "main_input_name", "input_ids")
    for base in _bases(maker, parameters, main):
        yield from _completed(base, maker, parameters)
    if dummy := _dummy(model):
        yield dummy


def _bases(maker: _Maker, parameters: Any, main: str) -> Iterator[Feed]:
    order = [main, *(name for name in MODALITIES if name != main)]
    singles = [name for name in order if name in parameters and name in MODALITIES]
    for name in singles:
        yield from ({name: value} for value in MODALITIES[name](maker))
    if "input_ids" in parameters:
        for name in singles:
            if name != "input_ids":
                yield from ({"input_ids": maker.ids(), name: value} for value in MODALITIES[name](maker))
    yield {}


def _completed(base: Feed, maker: _Maker, parameters: Any) -> Iterator[Feed]:
    """Yield the base alone, with all required arguments, and with the inputs of a decoder."""
    required = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in base
    ]
    known = {name: REST[name](maker) for name in required if name in REST}
    full = {**base, **known}
    if len(known) < len(required):
        return
    if "attention_mask" in parameters and "input_ids" in base and "attention_mask" not in full:
        mask = torch.ones(full["input_ids"].shape, dtype=torch.long)
        mask[-1, -2:] = 0
        extra = {"decoder_input_ids": maker.ids()} if "decoder_input_ids" in parameters else {}
        yield {**full, "attention_mask": mask, **extra}
    if "decoder_input_ids" in parameters:
        yield {**full, "decoder_input_ids": maker.ids()}
    if full:
        yield full


def _dummy(model: nn.Module) -> Feed | None:
    try:
        dummy = model.dummy_inputs
    except Exception:  # noqa: BLE001 - a property of every model, which some cannot give
        return None
    return dummy if isinstance(dummy, dict) else None


class _Maker:
    """A factory for tensors in the sizes that a model's configuration gives."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.model = model
        self.configs = [config, *_inner(config)]
        self.generator = torch.Generator().manual_seed(1)

    def size(self, *names: str, default: int) -> int:
        for config in self.configs:
            for name in names:
                value = getattr(config, name, None)
                if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                    value = value[0]
                if type(value) is int and value > 0:
                    return value
        return default

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def ids(self, tokens: int = TOKENS) -> Tensor:
        known = [m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding)]
        top = min(90, self.size("vocab_size", default=90), max(known, default=90))
        # Many models reserve the first few tokens, and those that mark the position of an image.
        return torch.randint(min(5, top - 1), top, (BATCH, tokens), generator=self.generator)

    def images(self) -> Iterator[Tensor]:
        channels = self.size("num_channels", "in_channels", "in_chans", default=3)
        sides = [self.size("image_size", "img_size", "input_size", default=64), 32, 64, 96, 128, 224]
        for side in dict.fromkeys(side for side in sides if side <= LARGEST):
            yield self.normal(BATCH, channels, side, side)

    def videos(self) -> Iterator[Tensor]:
        frames = self.size("num_frames", "frames", "n_frames", default=4)
        for image in self.images():
            if frames <= LONGEST:
                yield image[:1, None].expand(1, frames, *image.shape[1:]).clone()
                yield image[:1, :, None].expand(1, image.shape[1], frames, *image.shape[2:]).clone()

    def waves(self) -> Iterator[Tensor]:
        for length in (2000, 8000, 16000):
            yield self.normal(BATCH, length)
            yield self.normal(BATCH, 1, length)
        yield from self.spectra()

    def spectra(self) -> Iterator[Tensor]:
        bins = self.size("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim", default=80)
        positions = self.size("max_source_positions", default=32)
        yield self.normal(BATCH, bins, 2 * positions)
        for frames in (FRAMES, 64, self.size("max_length", default=64)):
            yield self.normal(BATCH, frames, bins)
            yield self.normal(BATCH, bins, frames)
            yield self.normal(BATCH, 1, frames, bins)
        for side in (64, 256, 1001):
            yield self.normal(BATCH, 1, side, bins)

    def hidden(self, tokens: int = TOKENS) -> Tensor:
        return self.normal(BATCH, tokens, self.width)

    @property
    def width(self) -> int:
        return self.size("hidden_size", "d_model", "embed_dim", "n_embd", "dim", "hidden_dim", default=32)

    def series(self) -> Iterator[Tensor]:
        length = self.size("context_length", "input_size", default=32)
        lags = max(getattr(self.configs[0], "lags_sequence", None) or [0])
        channels = self.size("num_input_channels", "input_size", default=1)
        yield self.normal(BATCH, length + lags)
        yield self.normal(BATCH, length + lags, channels)
        yield self.normal(BATCH, length, channels)

    def patches(self) -> Iterator[Tensor]:
        """Yield images that are already split into patches."""
        patch, channels = self.size("patch_size", default=14), self.size("num_channels", "in_channels", default=3)
        times = self.size("temporal_patch_size", default=1)
        yield self.normal(16, channels * times * patch * patch)
        yield self.normal(BATCH, 16, channels * patch * patch)
        yield self.normal(BATCH, 16, channels * patch * patch + 2)


def _inner(config: Any) -> list[Any]:
    found = []
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found += [value, *_inner(value)]
    return found


def _grid(_maker: _Maker) -> Tensor:
    return torch.tensor([[1, 4, 4]])


MODALITIES: dict[str, Callable[[_Maker], Any]] = {
    "input_ids": lambda m: [m.ids(), m.ids(64)],
    "pixel_values": lambda m: [*m.images(), *m.videos(), *m.patches()],
    "input_values": lambda m: m.waves(),
    "input_features": lambda m: m.spectra(),
    "pixel_values_videos": lambda m: m.videos(),
    "flattened_patches": lambda m: m.patches(),
    "past_values": lambda m: m.series(),
    "hidden_states": lambda m: [m.hidden(), m.hidden(16)[0], *m.images(), *m.patches()],
    "inputs_embeds": lambda m: [m.hidden()],
    "spectrogram": lambda m: m.spectra(),
    "inputs": lambda m: [m.hidden(), m.ids(), *m.images()],
}
REST: dict[str, Callable[[_Maker], Any]] = {
    "attention_mask": lambda _: torch.ones(BATCH, TOKENS, dtype=torch.long),
    "decoder_input_ids": lambda m: m.ids(),
    "encoder_hidden_states": lambda m: m.hidden(),
    "encoder_attention_mask": lambda _: torch.ones(BATCH, TOKENS, dtype=torch.long),
    "query_embeds": lambda m: m.hidden(),
    "inputs_embeds": lambda m: m.hidden(),
    "hidden_states": lambda m: m.hidden(16)[0],
    "pixel_values": lambda m: next(iter(m.images())),
    "input_ids": lambda m: m.ids(),
    "input_features": lambda m: next(iter(m.spectra())),
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "grid_hw": lambda _: torch.tensor([[4, 4]]),
    "position_ids": lambda _: torch.arange(TOKENS).expand(BATCH, -1),
    "bbox": lambda _: torch.zeros(BATCH, TOKENS, 4, dtype=torch.long),
    "past_time_features": lambda m: m.normal(
        BATCH, m.size("context_length", default=32) + max(getattr(m.configs[0], "lags_sequence", None) or [0]), 1
    ),
    "past_observed_mask": lambda m: torch.ones(
        BATCH, m.size("context_length", default=32) + max(getattr(m.configs[0], "lags_sequence", None) or [0])
    ),
    "timestep": lambda _: torch.tensor([1, 2]),
    "cu_seqlens": lambda _: torch.tensor([0, 16], dtype=torch.int32),
}
