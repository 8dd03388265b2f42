"""The work with tenterhook, with one session for each call."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks import raw
from benchmarks.harness import Values
from benchmarks.models import BLOCKS
from benchmarks.peers.common import EDITED, Peer, compete, double, loss, metric


def load(model: nn.Module, ids: torch.Tensor) -> Peer:
    """Return the peer. Nothing is created beforehand."""
    import tenterhook as th

    names = raw.called(model, lambda: model(ids))

    def blocks() -> Values:
        with th.record(model, *BLOCKS) as tape:
            model(ids)
        return {name: tape[name] for name in BLOCKS}

    def modules() -> Values:
        with th.record(model, "**") as tape:
            model(ids)
        return {name: tape[name or ":return"] for name in names}

    def edit() -> Values:
        with th.edit(model, {EDITED: double}):
            return {"logits": model(ids).logits}

    def gradients() -> Values:
        with th.record(model, *BLOCKS, grad=True) as tape:
            loss(model(ids)).backward()
        return {name: tape.grad[name] for name in BLOCKS}

    def patching() -> Values:
        with th.record(model, *BLOCKS) as clean:
            model(ids.flip(1))
        cases = th.grid(
            lambda block, position: {block: th.set(clean[block][:, position], at=th.at[:, position])},
            block=BLOCKS,
            position=range(ids.shape[1]),
        )
        return {"effects": th.sweep(model, cases, lambda out: metric(out.logits), ids, progress=False).values}

    ways = {"blocks": blocks, "modules": modules, "edit": edit, "gradients": gradients, "patching": patching}
    return Peer(f"tenterhook {th.__version__}", ways)


if __name__ == "__main__":
    compete(load)
