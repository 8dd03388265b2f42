"""One test for each promise, on models of several kinds."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.testing import Cell, Mixed, Residual, no_leak, untouched

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False))


def convolution():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten())


MODELS = {
    "residual": (Residual, X),
    "recurrent": (Cell, X[:, None]),
    "structures": (Mixed, X),
    "lstm": (lambda: nn.LSTM(4, 4), X),
    "convolution": (convolution, X[:, None].expand(2, 2, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), X[None]),
    "gpt2": (gpt2, torch.arange(8)[None]),
}


class Interrupts(nn.Module):
    def __init__(self, inner, error):
        super().__init__()
        self.inner, self.error = inner, error

    def forward(self, x):
        self.inner(x)
        raise self.error


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["return", "exception", "interrupt", "stop", "failing inside"])
def test_1_out_as_it_went_in(name, way):
    make, x = MODELS[name]
    model = make()
    buffers = {key: value.clone() for key, value in model.state_dict().items()}
    error = {"exception": ValueError(), "interrupt": KeyboardInterrupt()}.get(way)
    whole = Interrupts(model, error) if error else nn.Sequential(model)
    point = "inner" if error else "0"

    def run():
        wanted = [f"{point}:in"] if way == "stop" else ["**", "**:in"]
        with torch.random.fork_rng(), th.record(whole, *wanted, stop=way == "stop", grad=way != "stop"):
            with th.edit(whole, {point: lambda v: None}):
                if way == "failing inside":
                    with th.record(whole, f"{point}#9"):
                        whole(x)
                whole(x)

    batch_norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    for norm in batch_norms:
        norm.track_running_stats = False  # Otherwise the forward itself changes the statistics.
    with untouched(whole):
        if error:
            with pytest.raises(type(error)):
                run()
        elif way == "failing inside":
            with pytest.raises(th.NeverReached):
                run()
        else:
            run()
    assert all(torch.equal(value, buffers[key]) for key, value in model.state_dict().items())


def test_2_what_is_recorded_is_what_flowed_on():
    model = Residual()
    seen = []
    model.norm1.register_forward_hook(lambda m, a, output: output * 2)
    model.norm1.register_forward_hook(lambda m, a, output: seen.append(output.clone()))
    with th.record(model, "norm1") as tape, th.edit(model, {"norm1": th.add(1.0)}):
        model(X)
    assert torch.equal(tape["norm1"], seen[0] + 1)  # The value before the in-place ReLU.


def test_3_what_is_edited_takes_effect_exactly_once_in_recomputation_too():
    class Net(nn.Module):
        def __init__(self, way):
            super().__init__()
            torch.manual_seed(0)
            self.way, self.block = way, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=self.way) if self.way is not None else self.block(x)

    def run(way):
        model, x = Net(way), X.clone().requires_grad_()
        with untouched(model), th.edit(model, {"block.1": lambda v: v * v + 1}):
            loss = model(x).pow(2).sum()
        loss.backward()
        return [loss.detach(), x.grad, *[p.grad for p in model.parameters()]]

    plain = run(None)
    assert all(map(torch.allclose, run(True), plain))
    assert all(map(torch.allclose, run(False), plain))
    with pytest.raises(th.NeverReached), th.edit(Net(None), {"block.1": th.zero()}):
        pass


@pytest.mark.parametrize("name", MODELS)
def test_4_recording_changes_nothing(name):
    make, x = MODELS[name]

    def run(*, record):
        torch.manual_seed(0)
        model = make()
        torch.manual_seed(1)
        session = th.record(model, "**", "**:in") if record else None
        if session:
            session.start()
        output = model(x)
        while not isinstance(output, torch.Tensor):
            output = output[0]
        output.pow(2).sum().backward()
        if session:
            session.close()
        return [
            output.detach(),
            torch.get_rng_state(),
            *model.state_dict().values(),
            *[p.grad for p in model.parameters()],
        ]

    for one, other in zip(run(record=False), run(record=True), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_5_one_session_one_threads_calls():
    model = Residual()
    plain, found = model(X), []
    with th.record(model, "**") as tape, th.edit(model, {"norm2": th.zero()}):
        thread = threading.Thread(target=lambda: found.append(model(X)))
        thread.start()
        thread.join()
        assert len(tape) == 0
        model(X)
    assert torch.equal(found[0], plain)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("grad", [True, False])
def test_6_no_leak(name, grad):
    make, x = MODELS[name]
    model = make()
    for norm in [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]:
        norm.track_running_stats = False
    model(x)  # Some models create buffers at their first call.
    with no_leak(), torch.random.fork_rng():
        with th.record(model, "**", "**:in", grad=grad) as tape:
            output = model(x)
        watched = weakref.ref(tape)
        del output, tape
    gc.collect()
    assert watched() is None


def test_7_cost_follows_what_is_asked():
    model = gpt2()
    with th.record(model, "transformer.h.0.mlp"):
        touched = [name for name, module in model.named_modules() if "forward" in vars(module)]
        hooked = [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
        model(torch.arange(4)[None])
    assert touched == ["transformer.h.0.mlp"]
    assert hooked == []


def test_8_errors_teach():
    model = gpt2()
    with untouched(model.eval()):
        with pytest.raises(th.AddressError, match=r"transformer\.h\.0\.mlp"):
            th.record(model, "transformer.h.0.mpl")
        with pytest.raises(th.EditError, match=r"th\.set\(tensor\)"):
            th.edit(model, {"transformer.h.0": torch.ones(1)})
        with pytest.raises(th.NeverReached, match="called once, so its last call is #0"):
            with th.record(model, "lm_head#3"):
                model(torch.arange(4)[None])
    for name in th.__all__:
        found = getattr(th, name)
        if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, Warning):
            assert issubclass(found, th.TenterhookError), name
