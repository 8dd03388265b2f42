"""Interchange of a learned subspace beside pyvene, on the same weights and in the same subspace."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th

pytestmark = [pytest.mark.references, pytest.mark.filterwarnings("ignore")]  # Theirs, while it loads.

BASE, SOURCE = (torch.randint(1, 50, (3, 6), generator=torch.Generator().manual_seed(seed)) for seed in range(2))
POINT, LAST = "transformer.h.1", th.at[:, -1]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=32, initializer_range=0.2, use_cache=False
    )
    return GPT2LMHeadModel(config).eval()


def theirs(model, directions):
    """Return the logits with the part of the source in pyvene's model, at the last position."""
    import pyvene

    component = {
        "layer": 1, "component": "block_output", "low_rank_dimension": len(directions),
        "intervention_type": pyvene.LowRankRotatedSpaceIntervention,
    }  # fmt: skip
    made = pyvene.IntervenableModel(pyvene.IntervenableConfig([component]), model=copy.deepcopy(model))
    [intervention] = made.interventions.values()
    rotate = (intervention[0] if isinstance(intervention, (tuple, list)) else intervention).rotate_layer
    rotate.weight = directions.T
    with torch.no_grad():
        _, output = made({"input_ids": BASE}, [{"input_ids": SOURCE}], {"sources->base": (5, 5)})
    return output.logits


def test_a_part_of_another_input(model):
    directions = torch.linalg.qr(torch.randn(16, 3, generator=torch.Generator().manual_seed(2)))[0].T.contiguous()
    with torch.no_grad(), th.record(model, POINT) as tape:
        model(SOURCE)
    with torch.no_grad(), th.edit(model, {POINT: th.rotate(directions, tape[POINT], at=LAST)}):
        mine = model(BASE).logits
    torch.testing.assert_close(mine, theirs(model, directions), atol=1e-5, rtol=1e-4)


def test_a_learned_part(model):
    def loss(output, target):
        return torch.nn.functional.mse_loss(output.logits, target)

    with torch.no_grad():
        wanted = model(SOURCE).logits
    found = th.learn(
        model, {POINT: th.rotate(rank=2, at=LAST)}, [(BASE, SOURCE, wanted)], loss=loss, steps=40, progress=False
    )
    with torch.no_grad(), found.apply(model, SOURCE):
        mine = model(BASE).logits
    torch.testing.assert_close(mine, theirs(model, found.edits[POINT].directions), atol=1e-5, rtol=1e-4)
