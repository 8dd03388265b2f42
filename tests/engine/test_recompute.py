import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.testing import untouched

# PyTorch says so of an inner reentrant region, which first runs without gradients because the outer one does.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
WAYS = ["reentrant", "non-reentrant", "nested", "nested reentrant"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        # The same child three times in one region.
        return self.two(torch.tanh(self.one(torch.tanh(self.one(torch.tanh(self.one(x)))))))


class Net(nn.Module):
    """Two blocks, which run under activation checkpointing or not."""

    def __init__(self, way=None):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.blocks = way, nn.ModuleList([Block(), Block()])

    def forward(self, x):
        if self.way == "nested":
            return checkpoint(self.both, x, use_reentrant=False)
        if self.way == "nested reentrant":
            return checkpoint(self.both, x, use_reentrant=True)
        return self.both(x)

    def both(self, x):
        for block in self.blocks:
            x = self.one(block, x)
        return x

    def one(self, block, x):
        if self.way is None:
            return block(x)
        return checkpoint(block, x, use_reentrant="non" not in self.way and self.way != "nested")


EDITS = {
    "an output": {"blocks.0": th.scale(2)},
    "an output inside": {"blocks.1.two": lambda v: v.sin()},
    "an argument": {"blocks.0.one:in": th.scale(3)},
    "one call of several": {"blocks.0.one#1": th.scale(2), "blocks.1.one#2": lambda v: v * v},
    "a call index of one": {"blocks.1.one:in#0": lambda v: v.cos()},
    "a parameter": {"blocks.0.two.weight": lambda w: w * w, "blocks.1.one.bias": th.scale(2)},
    "noise": {"blocks.0.one": th.noise(0.5, seed=1)},
    "everything": {"blocks.*": th.scale(0.5), "blocks.*.two": [th.add(1.0), th.scale(2)]},
}


def gradients(model, session=None, *, during=None, close_first=False):
    x = X.clone().requires_grad_()
    session = session(model) if session else None
    if session:
        session.start()
    try:
        loss = model(x).pow(2).sum()
        if close_first and session:
            session.close()
        if during:
            with during(model):
                loss.backward()
        else:
            loss.backward()
    finally:
        if session:
            session.close()
    found = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    model.zero_grad()
    return loss.detach(), found


def same(one, other):
    assert torch.equal(one[0], other[0])
    for name, gradient in one[1].items():
        assert gradient is not None, name
        assert torch.allclose(gradient, other[1][name], rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", EDITS)
def test_the_gradients_of_an_edited_model_are_those_without_checkpointing(way, what):
    session = lambda model: th.edit(model, EDITS[what])
    same(gradients(Net(), session), gradients(Net(way), session))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", EDITS)
def test_the_gradients_are_right_if_the_session_was_closed_before_the_backward_pass(way, what):
    session, model = lambda model: th.edit(model, EDITS[what]), Net(way)
    with untouched(model):
        found = gradients(model, session, close_first=True)
    same(gradients(Net(), session), found)


@pytest.mark.parametrize("way", WAYS)
def test_a_session_that_is_opened_for_the_backward_pass_does_not_touch_the_recomputation(way):
    session = lambda model: th.edit(model, {"blocks.0.one": th.scale(2)})
    seen = []
    later = lambda model: th.edit(model, {"**": lambda v: seen.append(v) or v * 100, ":in": lambda v: None})
    expected = gradients(Net(), session)

    def during(model):
        class Open:
            def __enter__(self):
                self.session = later(model).start()

            def __exit__(self, *error):
                with pytest.raises(th.NeverReached):
                    self.session.close()

        return Open()

    same(expected, gradients(Net(way), session, during=during))
    same(expected, gradients(Net(way), session, during=during, close_first=True))
    assert seen == []


@pytest.mark.parametrize("way", WAYS)
def test_a_recording_that_is_opened_for_the_backward_pass_records_nothing(way):
    tapes = []

    class Open:
        def __init__(self, model):
            self.session = th.record(model, "**")

        def __enter__(self):
            tapes.append(self.session.__enter__())

        def __exit__(self, *error):
            with pytest.raises(th.NeverReached):
                self.session.__exit__(None, None, None)

    same(gradients(Net()), gradients(Net(way), during=Open))
    assert len(tapes[0]) == 0


@pytest.mark.parametrize("way", WAYS)
def test_what_is_recorded_is_not_recorded_again(way):
    plain, model = Net(), Net(way)
    with th.record(plain, "**") as expected:
        plain(X).sum().backward()
    with th.record(model, "**") as tape, th.record(model, "blocks.0.one") as lone:
        model(X.clone().requires_grad_()).sum().backward()
    assert list(tape) == list(expected)
    assert all(torch.equal(tape[address], expected[address]) for address in tape)
    assert len(lone) == 3


@pytest.mark.parametrize("way", WAYS)
def test_a_recording_changes_no_gradient(way):
    same(gradients(Net(way)), gradients(Net(way), lambda model: th.record(model, "**")))


@pytest.mark.parametrize("way", WAYS)
def test_the_call_indices_of_a_recomputation_are_those_of_the_first_run(way):
    calls = []
    session = lambda model: th.edit(model, {"blocks.0.one": lambda v, ctx: calls.append(ctx.call)})
    gradients(Net(way), session)
    assert calls[:3] == [0, 1, 2]
    again = calls[3:]
    assert len(again) >= 3
    assert all(again[k : k + 3] == [0, 1, 2][: len(again[k : k + 3])] for k in range(0, len(again), 3))


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
def test_two_forward_passes_before_one_backward_pass_keep_their_own_indices(way):
    def run(model):
        with th.edit(model, {"blocks.0#1": th.scale(3)}):
            loss = model(X).sum() + model(X.clone().requires_grad_() * 2).pow(2).sum()
            loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, found = run(Net()), run(Net(way))
    if way == "non-reentrant":
        assert expected.keys() == found.keys()
        assert all(torch.allclose(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("way", WAYS)
def test_two_sessions_act_in_the_same_order_again_even_if_the_outer_one_was_closed_in_between(way):
    def run(model, *, close):
        x = X.clone().requires_grad_()
        outer = th.edit(model, {"blocks.0.two": lambda v: v + 1}).start()
        inner = th.edit(model, {"blocks.0.two": lambda v: v * v}).start()
        loss = model(x).pow(2).sum()
        if close:
            outer.close()
        loss.backward()
        outer.close()
        inner.close()
        return loss.detach(), {"x": x.grad}

    same(run(Net(), close=False), run(Net(way), close=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_session_that_an_edit_closes_during_the_recomputation_stays_for_the_rest_of_it(way):
    edits = {"blocks.0.one": th.scale(2), "blocks.0.two": th.scale(3)}
    expected = gradients(Net(), lambda model: th.edit(model, edits))
    model = Net(way)
    x = X.clone().requires_grad_()

    def change(value):
        if torch._C._current_graph_task_id() != -1:
            session.close()
        return value * 2

    session = th.edit(model, {"blocks.0.one": change, "blocks.0.two": th.scale(3)}).start()
    loss = model(x).pow(2).sum()
    loss.backward()
    assert not session.is_open
    same(expected, (loss.detach(), {n: p.grad for n, p in model.named_parameters()} | {"x": x.grad}))
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_sequential_recomputes_with_the_edits(reentrant):
    def run(*, way):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(3, 3, dtype=torch.float64) if k % 2 else nn.Tanh() for k in range(6)])
        x = X.clone().requires_grad_()
        with th.edit(model, {"1": th.scale(2), "2": lambda v: v * v}):
            found = checkpoint_sequential(model, 2, x, use_reentrant=reentrant) if way else model(x)
        found.pow(2).sum().backward()
        return found.detach(), {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}

    same(run(way=False), run(way=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("close_first", [True, False])
def test_a_hugging_face_model_with_gradient_checkpointing(reentrant, close_first):
    config = GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.1
    ids = torch.arange(16).reshape(2, 8)

    def run(*, way):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).double().train()
        if way:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads() if reentrant else None
        edits = {"transformer.h.1.mlp": th.scale(2), "transformer.h.0.attn.c_attn": lambda v: v + v * v}
        session = th.edit(model, {**edits, "transformer.h.2.ln_1.weight": th.scale(0.5)}).start()
        torch.manual_seed(1)
        loss = model(ids, labels=ids).loss
        if close_first:
            session.close()
        loss.backward()
        session.close()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    same(run(way=False), run(way=True))


@pytest.mark.parametrize("way", WAYS)
def test_dropout_inside_a_region_is_the_same_with_a_recording(way):
    def run(*, record):
        torch.manual_seed(0)
        model = Net(way)
        model.blocks[0].two = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Dropout(0.5))
        torch.manual_seed(1)
        return gradients(model, (lambda m: th.record(m, "**")) if record else None)

    same(run(record=False), run(record=True))


@pytest.mark.parametrize("way", ["non-reentrant", "nested"])  # A reentrant region cannot be passed twice.
def test_a_second_backward_pass_through_a_kept_graph_finds_the_edits_again(way):
    def run(model):
        x = X.clone().requires_grad_()
        with th.edit(model, {"blocks.0.one": th.scale(2)}):
            loss = model(x).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach(), {"x": x.grad}

    same(run(Net()), run(Net(way)))


@pytest.mark.parametrize("way", WAYS)
def test_what_the_graph_carries_goes_with_the_graph(way):
    model = Net(way)
    session = th.edit(model, {"blocks.0.one": th.scale(2)}).start()
    loss = model(X.clone().requires_grad_()).sum()
    session.close()
    watched = weakref.ref(session)
    del session
    loss.backward()
    del loss
    gc.collect()
    assert watched() is None


def test_the_models_own_way_of_recomputing_is_edited_again_but_not_recorded_again():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, module, x):
            ctx.module = module
            ctx.save_for_backward(x)
            return module(x)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                y = ctx.module(x.detach().requires_grad_())
            y.backward(gradient)
            return None, torch.zeros_like(x)

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x):
            return Own.apply(self.linear, x)

    model = Holder()
    with th.record(model, "linear") as tape, th.edit(model, {"linear": th.scale(2)}):
        model(X.clone().requires_grad_()).sum().backward()
    assert len(tape) == 1
    assert torch.allclose(model.linear.bias.grad, torch.full((3,), 8.0, dtype=torch.float64))


@pytest.mark.parametrize("transform", [False, True], ids=["", "inside jvp"])
@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
def test_an_edit_in_a_checkpoint_in_which_gradients_are_switched_off_and_on_is_applied_again(way, transform):
    model = Net()

    def run(x):
        if not transform:
            return model.blocks[0](x)
        return torch.func.jvp(model.blocks[0], (x,), (torch.ones_like(x),))[0]

    def gradient(*, checkpointed):
        x = X.clone().requires_grad_()
        with torch.no_grad(), th.edit(model, {"blocks.0.one": th.scale(2)}), torch.enable_grad():
            loss = (checkpoint(run, x, use_reentrant=way == "reentrant") if checkpointed else run(x)).pow(2).sum()
        loss.backward()
        return x.grad

    assert torch.allclose(gradient(checkpointed=True), gradient(checkpointed=False))
