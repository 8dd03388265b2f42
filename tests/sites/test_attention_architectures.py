"""Attention patterns under SDPA are those of eager attention, over architectures of transformers in small sizes."""

import copy

import pytest
import torch

import tenterhook as th
from tenterhook._tree import tensors

pytest.importorskip("transformers")

from zoo import hugging

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

KINDS = """
    afmoe aimv2 albert apertus arcee aria_text audio-spectrogram-transformer bart beit bert bert-generation biogpt
    bitnet blenderbot camembert clip clipseg cohere cohere2 ctrl data2vec-audio data2vec-text deepseek_v2 deit detr
    dinov2 dinov3_vit distilbert doge dpt electra ernie ernie4_5 esm eurobert exaone4 falcon flex_olmo gemma
    gemma3_text glm4 gpt2 gpt_bigcode gpt_neox granite granitemoe helium hubert idefics3 internvl layoutlm llama
    llama4_text m2m_100 marian mbart minimax ministral mistral mixtral modernbert moonshine musicgen_decoder
    nemotron olmo2 opt owlv2 paligemma pegasus persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3_5_text roc_bert
    starcoder2 vit_mae whisper xlm-roberta-xl
"""


def weights_of(model, paths, given):
    """Return the weights that attention modules return in each call, ``[batch, head, query, key]``."""
    found = {path: [] for path in paths}

    def keep(path):
        def hook(_module, _args, output):
            parts = output[1:] if isinstance(output, tuple) else ()
            found[path].append(next((part for part in parts if isinstance(part, torch.Tensor)), None))

        return hook

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    torch.manual_seed(0)
    model(**given)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", KINDS.split())
@torch.no_grad()
def test_patterns_are_those_of_eager_attention(name):
    case = hugging.build(name)
    draw = torch.Generator().manual_seed(0)
    for parameter in case.model.parameters():  # Large weights: some keys count much more than others.
        if parameter.dim() == 2:
            parameter.copy_(2 * torch.randn(parameter.shape, generator=draw) / parameter.shape[-1] ** 0.5)
    models = {}
    for implementation in ("sdpa", "eager"):
        config = copy.deepcopy(case.model.config)
        model = type(case.model)._from_config(config, attn_implementation=implementation).eval()
        model.load_state_dict(case.model.state_dict())
        models[implementation] = model
    paths = [point.path for point in th.points(models["sdpa"], "**@pattern")]
    expected = weights_of(models["eager"], paths, case.kwargs)
    torch.manual_seed(0)
    plain = models["sdpa"](**case.kwargs)
    torch.manual_seed(0)
    with th.record(models["sdpa"], "**@pattern") as tape:
        output = models["sdpa"](**case.kwargs)
    for (path, one), (_, other) in zip(tensors(plain), tensors(output), strict=True):
        assert torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True), path
    compared = 0
    for path in paths:
        found = tape.calls(f"{path}@pattern") if expected[path] else []
        for mine, theirs in zip(found, expected[path], strict=True):
            if theirs is not None and theirs.shape == mine.shape:
                assert torch.allclose(mine, theirs, atol=1e-4), path
                compared += 1
    assert compared
