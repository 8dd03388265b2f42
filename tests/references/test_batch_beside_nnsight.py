"""Batches beside nnsight: one ``invoke`` for each prompt, on the same weights."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tenterhook as th

pytestmark = [pytest.mark.references, pytest.mark.filterwarnings("ignore")]  # Theirs, while it loads.

SHORT, LONG = (torch.randint(3, 50, (1, count), generator=torch.Generator().manual_seed(count)) for count in (5, 7))


@pytest.fixture(scope="module")
def pair():
    nnsight = pytest.importorskip("nnsight")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    words = WordLevel({str(index): index for index in range(50)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="2", pad_token="0", unk_token="0", padding_side="left"
    )
    return model, nnsight.LanguageModel(copy.deepcopy(model), tokenizer=tokenizer)


def test_each_case_is_what_an_invoke_of_the_same_prompt_gives(pair):
    model, theirs = pair
    with torch.no_grad(), theirs.trace() as tracer:
        with tracer.invoke(SHORT):
            theirs.model.layers[1].output[:, -1] = 0
            middle = theirs.model.layers[2].output.save()
            first = theirs.lm_head.output.save()
        with tracer.invoke(LONG):
            theirs.model.layers[0].output[:, -2] *= 2
            second = theirs.lm_head.output.save()
    found = th.batch(
        model,
        [
            th.case(SHORT, edits={"model.layers.1": th.zero(at=th.at[:, -1])}, record="model.layers.2"),
            th.case(LONG, edits={"model.layers.0": th.scale(2, at=th.at[:, -2])}),
        ],
    )
    # They pad on the left and leave the padding in what they save; rotary positions are relative.
    torch.testing.assert_close(found[0].output.logits, first[:, -5:].detach(), atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(found[0].tape["model.layers.2"], middle[:, -5:].detach(), atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(found[1].output.logits, second.detach(), atol=2e-6, rtol=1e-4)
