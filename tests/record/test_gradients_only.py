"""Gradients without values: the same gradients, and nothing kept of what passes."""

import gc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.errors import GradientError, NeverReached, NotRecorded, TapeError
from tenterhook.pytorch.dynamo_probe import can_trace_hooks
from tenterhook.testing import no_leak
from tests.record.test_gradients_random import Unrolled, check_points, made, plans, reached

IDS = torch.arange(12).reshape(2, 6)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False)
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config).eval()


class Steps(nn.Module):
    """An addition, of which autograd saves nothing, and what it gave."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Plus(), Plus()

    def forward(self, x):
        y = self.first(x)
        self.memory = StorageWeakRef(y.untyped_storage())
        return self.last(y)


class Plus(nn.Module):
    def forward(self, x):
        return x + 1


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(plan=plans, data=st.data(), seed=st.integers(0, 9))
def test_a_random_model_has_the_gradients_of_the_unrolled_one_and_its_own_are_as_ever(plan, data, seed):
    model, values = made(plan, seed)
    names = sorted(reached(model, values))
    chosen = data.draw(st.lists(st.sampled_from(names + [f"{name}:in" for name in names]), min_size=1, unique=True))
    model(values.clone().requires_grad_()).pow(2).sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    unrolled = Unrolled(model)
    loss = unrolled(values.clone().requires_grad_()).pow(2).sum()
    for _ in range(3):  # By the third step it is known which views need no more than their own hook.
        model.zero_grad()
        with th.record(model, *chosen, grad=True, values=False) as tape:
            model(values.clone().requires_grad_()).pow(2).sum().backward()
        check_points(tape, chosen, unrolled, loss, values=False)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_every_kind_of_point_has_the_gradient_that_it_has_beside_its_value():
    points = ("transformer.h.*", "transformer.h.0.mlp:in", "lm_head.weight", "transformer.h.1.attn:attn_output")
    points += ("transformer.h.0.mlp.act", "transformer.h.1.ln_1:input")
    found = []
    for values in (True, False):
        model = gpt2()
        with th.record(model, *points, grad=True, values=values) as tape:
            model(IDS).logits.pow(2).sum().backward()
        found.append(dict(tape.grad))
    both, alone = found
    assert list(both) == list(alone)
    assert len(both) == 10
    for name in both:
        assert torch.equal(both[name], alone[name])


def test_what_passes_is_free_when_the_model_is_done_with_it():
    model, x = Steps(), torch.ones(3, requires_grad=True)
    with th.record(model, "first", grad=True, values=False) as tape:
        out = model(x)
        assert model.memory.expired()
        assert tape.nbytes == 0
        out.sum().backward()
    assert torch.equal(tape.grad["first"], torch.ones(3))
    with th.record(model, "first", grad=True):
        model(x)
        assert not model.memory.expired()


def test_many_steps_leave_nothing_behind():
    model = gpt2()
    gc.collect()
    gc.disable()
    try:
        with no_leak(), th.record(model, "**", grad=True, values=False, keep="last"):
            for _ in range(20):
                model(IDS).logits.sum().backward()
            model.zero_grad()
    finally:
        gc.enable()


def test_calls_are_counted_and_a_single_one_can_be_asked_for():
    shared = nn.Linear(3, 3)
    model, x = nn.Sequential(shared, nn.Tanh(), shared), torch.ones(2, 3)
    first = shared(x)
    second = shared(first.tanh())
    wanted = torch.autograd.grad(second.pow(2).sum(), (first, second))
    with th.record(model, "0", grad=True, values=False) as tape:
        model(x).pow(2).sum().backward()
    assert all(torch.equal(mine, true) for mine, true in zip(tape.grad.calls("0"), wanted, strict=True))
    with th.record(model, "0#1", grad=True, values=False) as tape:
        model(x).pow(2).sum().backward()
    assert torch.equal(tape.grad["0#1"], wanted[1])


@pytest.mark.skipif(not can_trace_hooks(), reason="this torch traces no hooks on tensors")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The compiler uses what PyTorch has deprecated.
def test_a_compiled_model_gives_them_in_one_graph():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    fast, x = torch.compile(model, fullgraph=True, backend="aot_eager"), torch.ones(2, 3)
    fast(x)
    session = th.record(model, "0", grad=True, values=False)
    with session as tape:
        fast(x).sum().backward()
    assert session.compiled.breaks == 0
    first = model[0](x)
    torch.testing.assert_close(tape.grad["0"], torch.autograd.grad(model[2](first.tanh()).sum(), first)[0])


def test_tape_backward_a_file_and_the_table(tmp_path):
    model = gpt2()
    with th.record(model, "transformer.h.*", grad=True, values=False) as tape:
        loss = model(IDS).logits.sum()
    assert "transformer.h.1" in tape.backward(loss)
    assert model.lm_head.weight.grad is None
    tape.save(tmp_path / "run.th")
    again = th.load(tmp_path / "run.th")
    assert torch.equal(again.grad["transformer.h.0"], tape.grad["transformer.h.0"])
    for each in (tape, again):
        assert "0 values, 2 gradients" in str(each)
        assert "transformer.h.1" in str(each)
        with pytest.raises(NotRecorded, match=r"only gradients .* read tape.grad\['transformer.h.0'\]"):
            each["transformer.h.0"]
    with pytest.raises(TapeError, match="no values to draw"):
        th.page(tmp_path / "page.html", tape)


def test_what_makes_no_sense_is_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="grad=True, values=False"):
        th.record(model, "0", values=False)
    with pytest.raises(ValueError, match="stop=True"):
        th.record(model, "0", grad=True, values=False, stop=True)
    with pytest.raises(NeverReached, match="0"), th.record(model, "0", grad=True, values=False):
        pass
    with th.record(model, "0", grad=True, values=False) as tape, torch.no_grad():
        model(torch.ones(1, 2))
    with pytest.raises(GradientError, match="no_grad"):
        tape.grad["0"]


class Viewed(nn.Module):
    """It returns a view of memory that no operation saves for the backward pass."""

    def forward(self, x):
        y = (x + 1).view(-1)
        self.memory = StorageWeakRef(y.untyped_storage())
        return y


@pytest.mark.parametrize("values", [False, True])
def test_without_values_the_memory_of_a_view_is_not_kept(values):
    model, x = nn.Sequential(nn.Linear(3, 3), Viewed(), nn.Dropout(0.0)), torch.ones(2, 3)
    with th.record(model, grad=True, values=values) as tape:
        loss = model(x).sum()
        assert model[1].memory.expired() is not values
        loss.backward()
    assert torch.equal(tape.grad["1"], torch.ones(6))


def test_an_edit_at_a_container_comes_before_that_of_its_last_child():
    model, x = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Identity())), torch.randn(2, 3)
    slope = 2 * model(x).detach()
    for order in (["0", "0.0", "0.1"], ["0.1", "0.0", "0"]):
        changes = {"0": lambda g: g + 1, "0.1": lambda g: g * 2, "0.0": lambda g: g - 3}
        mine = x.clone().requires_grad_()
        edit = th.edit(model, grad={point: changes[point] for point in order})
        with edit, th.record(model, grad=True, values=False) as tape:
            model(mine).square().sum().backward()
        assert torch.equal(tape.grad[":return"], slope)
        assert torch.equal(tape.grad["0"], slope + 1)
        assert torch.equal(tape.grad["0.1"], (slope + 1) * 2)
        assert torch.equal(tape.grad["0.0"], (slope + 1) * 2 - 3)
        torch.testing.assert_close(mine.grad, ((slope + 1) * 2 - 3) @ model[0][0].weight)
