"""The work with torchlens, which traces every operation and keeps the requested ones."""

from __future__ import annotations

import warnings
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Values
from benchmarks.models import BLOCKS
from benchmarks.peers.common import Peer, compete


def load(model: nn.Module, ids: torch.Tensor) -> Peer:
    """Return the peer. Nothing is created beforehand: each trace is independent."""
    import torchlens

    warnings.filterwarnings("ignore", module="contextlib")  # each trace warns that the model reads a scalar
    trace = partial(torchlens.trace, model, ids)
    only_blocks = torchlens.options.CaptureOptions(layers_to_save=list(BLOCKS))

    def blocks() -> Values:
        traced = trace(capture=only_blocks)
        return {name: traced.modules[name].out for name in BLOCKS}

    def modules() -> Values:
        traced = trace()
        return {_name(module): module.out for module in traced.modules if _name(module)}

    return Peer(f"torchlens {version('torchlens')}", {"blocks": blocks, "modules": modules})


def _name(module: Any) -> str:
    """Return the path of a module.

    The root, ``self``, and its body return a structure, of which torchlens keeps one tensor.
    """
    return "" if module.address in {"self", "transformer"} else module.address


if __name__ == "__main__":
    compete(load)
