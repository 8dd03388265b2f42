"""Calls numbered by the run, and calls of generate."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
SIX = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=32)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    return GPT2LMHeadModel(config).eval()


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = nn.Linear(3, 3)

    def forward(self, x):
        for _ in range(4):
            x = self.step(x)
            doubled = x * 2
        return doubled


def test_a_call_number_counts_in_the_session_or_in_each_run():
    model, x = Loop(), torch.randn(2, 3)
    for numbering, expected in (("session", ["step#2"]), ("run", ["step#2", "step#6", "step#10"])):
        with th.record(model, "step#2", numbering=numbering) as tape:
            for _ in range(3):
                model(x)
        assert list(tape) == expected


def test_variables_and_ranges_count_in_each_run_too():
    model, x = Loop(), torch.randn(2, 3)
    with th.record(model, ":doubled#{1..2}", numbering="run") as tape:
        model(x)
        model(x)
    assert list(tape) == [":doubled#1", ":doubled#2", ":doubled#5", ":doubled#6"]


def test_a_call_of_generate_is_one_run():
    model, seen = gpt2(), []
    with th.edit(model, {"transformer.h.1#3": lambda _, ctx: seen.append(ctx.call)}, numbering="run"):
        model.generate(IDS, **SIX)
        model.generate(IDS, **SIX)
        model(IDS)
        model(IDS)
    assert seen == [3, 9]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_of_an_earlier_run_is_edited_in_the_same_calls(reentrant):
    x = torch.randn(2, 3, requires_grad=True)
    torch.manual_seed(0)
    model, grads = Loop(), []
    for checkpointed in (False, True):
        losses = []
        model.zero_grad()
        with th.edit(model, {"step#1": th.scale(3.0)}, numbering="run"):
            for factor in (1.0, 2.0):
                if checkpointed:
                    out = torch.utils.checkpoint.checkpoint(model, x * factor, use_reentrant=reentrant)
                else:
                    out = model(x * factor)
                losses.append(out.square().sum())
        sum(losses).backward()
        grads.append(model.step.weight.grad.clone())
    assert torch.allclose(*grads)


def test_the_model_has_its_own_generate_again():
    model = gpt2()
    first, second = th.record(model, "transformer.h.0"), th.record(model, "transformer.h.1")
    first.start()
    second.start()
    model.generate(IDS, **SIX)
    first.close()  # Not in the reverse order.
    assert "generate" in model.__dict__
    second.close()
    assert "generate" not in model.__dict__
    assert not model._forward_pre_hooks


def test_a_generate_of_the_instance_comes_back():
    model = gpt2()
    own = model.generate
    model.generate = functools.partial(own)
    mine = model.__dict__["generate"]
    with th.record(model, "transformer.h.0") as tape:
        model.generate(IDS, **SIX)
    assert model.__dict__["generate"] is mine
    assert tape.sequence("transformer.h.0").shape == (2, 9, 16)


def test_an_error_in_generate_leaves_nothing_behind():
    model = gpt2()
    with pytest.raises(ValueError, match="stop here"), th.edit(model, {"transformer.h.0#2": _fail}):
        with th.record(model, "transformer.h.1"):
            model.generate(IDS, **SIX)
    assert "generate" not in model.__dict__
    assert not model._forward_pre_hooks


def _fail(_value):
    raise ValueError("stop here")


def test_a_copy_made_in_a_session_generates_by_itself():
    model = gpt2()
    with th.record(model, "transformer.h.1") as tape:
        other = copy.deepcopy(model)
        model(IDS)
        with torch.no_grad():
            other.lm_head.weight.zero_()
        tokens = other.generate(IDS, **SIX)
    assert len(tape) == 1
    assert tokens.shape == (2, 10)
    assert "generate" not in other.__dict__


def test_another_numbering_is_refused():
    with pytest.raises(ValueError, match='"session" or "run"'):
        th.record(Loop(), "step", numbering="step")
