"""Edge attribution beside that of TransformerLens, on the same weights.

TransformerLens scores each position; here the positions are added up, as a whole part of the model is patched.
"""

from collections import defaultdict

import pytest
import torch
from reference_models import gpt2_and_bridge

import tenterhook as th

pytestmark = [pytest.mark.references, pytest.mark.filterwarnings("ignore")]  # Theirs, while it loads.

CLEAN = torch.randint(1, 50, (3, 6), generator=torch.Generator().manual_seed(0))
CORRUPT = torch.randint(1, 50, (3, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def pair():
    return gpt2_and_bridge()


def sender(node):
    names = {"embed": "embed", "attn_head_out": f"attn{node.layer}.{node.head}", "mlp_out": f"mlp{node.layer}"}
    return names[node.kind]


def receiver(node):
    if node.kind in ("q_input", "k_input", "v_input"):
        return f"attn{node.layer}.{node.head}.{node.kind[0]}"
    return {"mlp_in": f"mlp{node.layer}", "logits": "logits"}[node.kind]


def test_edge_attribution(pair):
    from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, attribution_patch

    model, bridge = pair
    config = EdgeAttributionConfig(granularity="edge")
    theirs = attribution_patch(
        bridge, CLEAN, CORRUPT, lambda logits: (logits[:, -1, 3] - logits[:, -1, 5]).sum(), config
    )
    expected = defaultdict(float)
    for (one, other), score in theirs.edge_scores.items():
        expected[sender(one), receiver(other)] += score
    found = th.recipes.circuit.edges(
        model, CLEAN, CORRUPT, metric=lambda out: out.logits[:, -1, 3] - out.logits[:, -1, 5], mode="denoise"
    )
    assert len(expected) == int(found.exists.sum())
    size = max(map(abs, expected.values()))
    for edge, score in expected.items():
        assert found.score(*edge) == pytest.approx(score, abs=2e-5 * size), edge
