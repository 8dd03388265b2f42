"""The work with pyvene, whose interventions are configured once for a model."""

from __future__ import annotations

import copy
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Values
from benchmarks.models import BLOCKS, TOKENS
from benchmarks.peers.common import Peer, compete, double

EVERYWHERE = {"base": list(range(TOKENS))}


def load(model: nn.Module, ids: torch.Tensor) -> Peer:
    """Configure one intervenable model for each piece of work, because a model has only one configuration."""
    import pyvene

    points = [_component(name, intervention_type=pyvene.CollectIntervention) for name in BLOCKS]
    collecting = pyvene.IntervenableModel(pyvene.IntervenableConfig(points), model=copy.deepcopy(model))
    doubling = pyvene.IntervenableModel(
        _component("transformer.h.5.mlp", intervention=lambda base, _source: double(base)), model=model
    )

    def blocks() -> Values:
        (_, collected), _ = collecting({"input_ids": ids}, unit_locations=EVERYWHERE)
        return dict(zip(BLOCKS, collected, strict=True))

    def edit() -> Values:
        _, output = doubling({"input_ids": ids}, unit_locations=EVERYWHERE)
        return {"logits": output.logits}

    return Peer(f"pyvene {version('pyvene')}", {"blocks": blocks, "edit": edit})


def _component(name: str, **settings: Any) -> dict[str, Any]:
    """Return the point after a module in pyvene's notation: ``transformer.h[5].output``."""
    parts = [f"[{part}]" if part.isdigit() else f".{part}" for part in name.split(".")]
    return {"component": "".join(parts).removeprefix(".") + ".output", **settings}


if __name__ == "__main__":
    compete(load)
