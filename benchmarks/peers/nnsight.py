"""The work with nnsight."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.harness import Values
from benchmarks.models import BLOCKS
from benchmarks.peers.common import EDITED, Peer, compete


def load(module: nn.Module, ids: torch.Tensor) -> Peer:
    """Wrap the model once, as nnsight requires."""
    import nnsight

    model = nnsight.NNsight(module)

    def blocks() -> Values:
        kept = {}
        with model.trace(ids):
            for name in BLOCKS:
                kept[name] = model.get(name).output.save()
        return kept

    def modules() -> Values:
        with model.trace(ids) as tracer:
            cache = tracer.cache().save()
        return {path.removeprefix("model").removeprefix("."): cache[path].output for path in cache.keys()}  # noqa: SIM118

    def edit() -> Values:
        with model.trace(ids):
            target = model.get(EDITED)
            target.output = target.output * 2
            output = model.output.save()
        return {"logits": output.logits}

    def gradients() -> Values:
        kept = {}
        with model.trace(ids):
            outputs = [(name, model.get(name).output) for name in BLOCKS]
            with model.output.logits.sum().backward():
                for name, output in reversed(outputs):
                    kept[name] = output.grad.save()
        return kept

    ways = {"blocks": blocks, "modules": modules, "edit": edit, "gradients": gradients}
    return Peer(f"nnsight {nnsight.__version__}", ways)


if __name__ == "__main__":
    compete(load)
