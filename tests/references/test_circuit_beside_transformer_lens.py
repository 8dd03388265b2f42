"""Edge attribution beside that of TransformerLens, on the same weights.

TransformerLens scores each position; here the positions are added up, as a whole part of the model is patched.
"""

import copy
from collections import defaultdict

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import tenterhook as th

pytestmark = [pytest.mark.references, pytest.mark.filterwarnings("ignore")]  # Theirs, while it loads.

CLEAN = torch.randint(1, 50, (3, 6), generator=torch.Generator().manual_seed(0))
CORRUPT = torch.randint(1, 50, (3, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def pair():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformer_lens.model_bridge import TransformerBridge

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    words = WordLevel({str(index): index for index in range(50)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="0", pad_token="0", unk_token="0")
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=copy.deepcopy(model), tokenizer=tokenizer)
    return model, bridge.eval()


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
