"""A watch puts its hooks on when the model returns: what that could miss, and does not."""

import warnings

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.watch import measuring, observe, turns


class Force(nn.Module):
    """An energy and, where asked for, its derivative, which takes a backward pass inside the forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)
        self.derives = True

    def forward(self, x):
        energy = self.second(torch.tanh(self.first(x))).sum()
        if not self.derives:
            return energy
        return torch.autograd.grad(energy, x, create_graph=True)[0].pow(2).sum()


def leaf(x):
    return x.clone().requires_grad_()


def gradient_norm(model, x):
    """The norm of what comes back to the first layer in all backward passes of a step, by hooks put on by hand."""
    found = []

    def hook(_module, _args, output):
        output.register_hook(lambda gradient: found.append(gradient.detach().clone()))

    with model.first.register_forward_hook(hook):
        model(leaf(x)).backward()
    model.zero_grad()
    return float(torch.linalg.vector_norm(sum(found))), len(found)


@pytest.fixture(params=[0, 2**15], ids=["by hooks", "by autograd"])
def _way(request, monkeypatch):
    monkeypatch.setattr(turns, "PATIENT", {"cpu"})  # As it is for a GPU.
    monkeypatch.setattr(observe, "SMALL", request.param)


@pytest.mark.usefixtures("_way")
def test_a_backward_pass_inside_the_forward_is_seen_in_every_step():
    model, x = Force(), torch.randn(5, 3)
    expected, passes = gradient_norm(model, x)
    assert passes == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with th.watch(model, steps="call", of=("values", "gradients")) as watch:
            for step in range(4):
                model(leaf(x)).backward()
                watch.step()
                assert watch.row("first", "gradients")["last"]["norm"] == pytest.approx(expected, rel=1e-5), step


@pytest.mark.usefixtures("_way")
def test_one_that_comes_as_a_surprise_is_told_of_and_seen_from_then_on():
    model, x = Force(), torch.randn(5, 3)
    expected, _ = gradient_norm(model, x)
    model.derives = False
    with th.watch(model, steps="call", of=("values", "gradients")) as watch:
        for _ in range(3):
            model(leaf(x)).backward()
            watch.step()
        model.derives = True
        with pytest.warns(th.TenterhookWarning, match="a backward pass ran while the model was called.*step 3"):
            model(leaf(x)).backward()
        watch.step()
        for _ in range(2):
            model(leaf(x)).backward()
            watch.step()
            assert watch.row("first", "gradients")["last"]["norm"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("_way")
def test_who_asks_for_no_gradients_is_not_told_of_any():
    model, x = Force(), torch.randn(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with th.watch(model, steps="call", of=("values",)):
            for model.derives in (False, False, False, True, True):
                model(leaf(x)).backward()


@pytest.mark.usefixtures("_way")
def test_a_part_that_is_called_by_itself_is_hooked_at_once():
    model, x = Force(), torch.randn(5, 3)
    model.derives = False
    with th.watch(model, of=("values", "gradients"), steps="manual") as watch:
        for _ in range(2):
            model(leaf(x)).backward()
            watch.step()
        model.first(x).pow(2).sum().backward()
        watch.step()
        expected = torch.linalg.vector_norm(2 * model.first(x))
        assert watch.row("first", "gradients")["last"]["norm"] == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.usefixtures("_way")
def test_a_call_that_fails_leaves_nothing_that_disturbs_the_next():
    model, x = Force(), torch.randn(5, 3)
    model.derives = False
    expected, _ = gradient_norm(model, x)
    with th.watch(model, of=("values", "gradients"), steps="manual") as watch:
        for _ in range(2):
            model(leaf(x)).backward()
            watch.step()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(5, 4))
        watch.step()
        model(leaf(x)).backward()
        watch.step()
        assert watch.row("first", "gradients")["last"]["norm"] == pytest.approx(expected, rel=1e-5)
        assert watch.row("second", "gradients")["last"]["count"] == 5


class Twice(nn.Module):
    """A model that calls itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, again=True):
        x = torch.tanh(self.first(x))
        return self.last(self(x, again=False) if again else x)


@pytest.mark.usefixtures("_way")
def test_a_model_that_calls_itself_is_no_surprise():
    model, x, found = Twice(), torch.randn(5, 3), []

    def hook(_module, _args, output):
        output.register_hook(found.append)

    with model.first.register_forward_hook(hook):
        model(x).pow(2).sum().backward()
    expected = torch.linalg.vector_norm(torch.cat(found))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with th.watch(model, of=("values", "gradients"), steps="manual") as watch:
            for _ in range(4):
                model(x).pow(2).sum().backward()
                watch.step()
                norm = watch.row("first", "gradients")["last"]["norm"]
                assert norm == pytest.approx(float(expected), rel=1e-5)


def test_what_a_model_returns_in_a_structure_is_measured_once(monkeypatch):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    ids = torch.randint(0, 50, (2, 8))
    asked = []

    def spied(tensors, *args, **kwargs):
        asked.append([tensor.data_ptr() for tensor in tensors])
        return measure(tensors, *args, **kwargs)

    measure = measuring.measure
    monkeypatch.setattr(measuring, "measure", spied)
    with th.watch(model, of=("values", "gradients")) as watch:
        for _ in range(3):
            output = model(ids, labels=ids)
            output.loss.backward()
            logits = output.logits.detach()
            watch.step()
            assert sum(places.count(logits.data_ptr()) for places in asked) == 1
            asked.clear()
            for address in ("lm_head", ":return['logits']"):
                norm = watch.row(address, "values")["last"]["norm"]
                assert norm == pytest.approx(float(torch.linalg.vector_norm(logits)), rel=1e-5)
