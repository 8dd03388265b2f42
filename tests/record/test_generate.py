"""Generation with a key-value cache: hundreds of calls of the same modules."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tenterhook as th
from tenterhook.testing import untouched

IDS = torch.tensor([[1, 2, 3]])
STEPS = 100


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=50,
        n_positions=200,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval(), "transformer.h.0"


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=50, max_position_embeddings=200, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), "model.layers.0"


def generated(model):
    return model.generate(IDS, max_new_tokens=STEPS, do_sample=False)


@pytest.fixture(params=[gpt2, llama], ids=["gpt2", "llama"])
def pair(request):
    return request.param()


def test_every_step_is_a_call_and_the_tokens_are_the_same(pair):
    model, block = pair
    wanted = generated(model)
    with untouched(model), th.record(model, block, "lm_head") as tape:
        assert torch.equal(generated(model), wanted)
    assert len(tape.calls(block)) == STEPS
    assert tape[f"{block}#0"].shape == (1, 3, 16)
    assert tape[f"{block}#-1"].shape == (1, 1, 16)
    chosen = torch.stack([logits[0, -1].argmax() for logits in tape.calls("lm_head")])
    assert torch.equal(chosen, wanted[0, 3:])


def test_keep_bounds_the_memory(pair):
    model, block = pair
    with th.record(model, block, keep=4) as tape:
        generated(model)
    assert list(tape) == [f"{block}#{call}" for call in range(STEPS - 4, STEPS)]
    assert tape.nbytes == 4 * 16 * 4


def test_an_edit_acts_at_every_step(pair):
    model, _ = pair
    seen = []

    def seventh(logits, ctx):
        seen.append(ctx.call)
        return torch.nn.functional.one_hot(torch.tensor(7), 50).float().expand_as(logits)

    with th.edit(model, {"lm_head": seventh}):
        found = generated(model)
    assert found[0, 3:].unique().tolist() == [7]
    assert seen == list(range(STEPS))


def test_an_edit_of_one_step_changes_what_comes_after_it_only(pair):
    model, block = pair
    wanted = generated(model)
    with th.edit(model, {f"{block}#20": lambda v: -v * 10}), th.record(model, block) as tape:
        found = generated(model)
    assert torch.equal(found[0, :23], wanted[0, :23])
    assert len(tape.calls(block)) == STEPS


def test_a_stop_ends_generation_at_the_first_step(pair):
    model, block = pair
    with th.record(model, block, stop=True) as tape:
        generated(model)
    assert list(tape) == [block]
