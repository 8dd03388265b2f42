"""FLOPs and saved bytes on real architectures equal PyTorch's own counters."""

import os

import pytest
import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from counters import counted

import tenterhook as th
from zoo import hugging

FEW = ("gpt2", "llama", "bert", "vit", "resnet")
MORE = (
    "albert", "bart", "beit", "bloom", "clip", "convbert", "convnext", "convnextv2", "deberta-v2", "deit",
    "dinov2", "distilbert", "electra", "esm", "falcon", "fnet", "gemma", "gpt_neox", "mistral", "mixtral",
    "mobilevit", "mobilenet_v2", "mpt", "olmo", "opt", "phi", "poolformer", "qwen2", "regnet", "roberta", "segformer",
    "swin", "t5", "wav2vec2", "whisper", "xlm", "xlnet", "yolos", "mamba",
)  # fmt: skip


def check(name):
    case = hugging.build(name)
    model, args, kwargs = case.model, case.args, case.kwargs
    cost = th.cost(model, *args, loss=first, **kwargs)
    assert (cost.flops, cost.backward_flops, cost.saved_bytes) == counted(model, lambda: first(model(*args, **kwargs)))
    assert cost.flops == cost[""].flops > 0
    assert cost[""].backward_flops == cost.backward_flops
    assert sum(each.own_flops for each in cost) == cost.flops
    assert cost[""].saved_bytes >= 0.9 * cost.saved_bytes  # The loss saves little.


def first(output):
    found = next(each for each in output.to_tuple() if isinstance(each, torch.Tensor) and each.requires_grad)
    return found.float().square().mean()


@pytest.mark.parametrize("name", FEW)
@pytest.mark.filterwarnings("ignore")  # The libraries' own remarks on tiny configurations.
def test_the_cost_of_a_common_architecture_equals_the_counters_of_pytorch(name):
    check(name)


@pytest.mark.zoo
@pytest.mark.parametrize("name", MORE)
@pytest.mark.filterwarnings("ignore")
def test_the_cost_of_an_architecture_equals_the_counters_of_pytorch(name):
    check(name)
