"""The work with TransformerLens, whose bridge computes attention and norms in its own way."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Values
from benchmarks.models import BLOCKS, VOCABULARY
from benchmarks.peers.common import Peer, compete, double, metric

KEPT = {f"blocks.{index}.hook_out": name for index, name in enumerate(BLOCKS)}
EDITED = "blocks.5.mlp.hook_out"


def load(module: nn.Module, ids: torch.Tensor) -> Peer:
    """Boot the bridge over the model. The name only selects the adapter."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge: Any = TransformerBridge.boot_transformers("gpt2", hf_model=module, tokenizer=_tokenizer())

    def blocks() -> Values:
        _, cache = bridge.run_with_cache(ids, names_filter=KEPT.__contains__)
        return {name: cache[point] for point, name in KEPT.items()}

    def modules() -> Values:
        _, cache = bridge.run_with_cache(ids)
        return {name: cache[point] for point, name in KEPT.items()}

    def edit() -> Values:
        return {"logits": bridge.run_with_hooks(ids, fwd_hooks=[(EDITED, lambda value, hook: double(value))])}  # noqa: ARG005

    def patching() -> Values:
        from transformer_lens import patching as theirs

        _, clean = bridge.run_with_cache(ids.flip(1))
        every = theirs.generic_activation_patch(
            bridge,
            ids,
            clean,
            metric,
            patch_setter=theirs.layer_pos_patch_setter,
            activation_name="resid_post",
            index_axis_names=("layer", "pos"),
        )
        return {"effects": every.flatten()}

    name = f"TransformerLens {version('transformer-lens')}"
    notes = {"modules": "all points of its own; 12 compared"}
    return Peer(
        name, {"blocks": blocks, "modules": modules, "edit": edit, "patching": patching}, tolerance=1e-5, notes=notes
    )


def _tokenizer() -> Any:
    """Return a tokenizer, which the bridge requires although the input is already tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({str(index): index for index in range(VOCABULARY)}, unk_token="0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="0", pad_token="0", unk_token="0")


if __name__ == "__main__":
    compete(load)
