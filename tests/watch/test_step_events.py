"""A watch puts its hooks on when the model returns: what that could miss, and does not."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.pytorch.autograd import new_backward_id as passes
from tenterhook.watch import measured_batch, observers, step_events


class Force(nn.Module):
    """An energy and, where asked for, its derivative, which takes a backward pass inside the forward."""

    def __init__(self, times=1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)
        self.derives, self.times = True, times

    def forward(self, x):
        energy = sum(self.second(torch.tanh(self.first(x * by))).sum() for by in range(1, self.times + 1))
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
    calls = torch.cat([sum(found[call :: model.times]) for call in range(model.times)])
    return float(torch.linalg.vector_norm(calls)), len(found)


@pytest.fixture(params=[0, 2**15], ids=["by hooks", "by autograd"])
def _way(request, monkeypatch):
    monkeypatch.setattr(step_events, "DEFERRED_ON", {"cpu"})  # As it is for a GPU.
    monkeypatch.setattr(observers, "SMALL", request.param)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("times", [1, 2])
def test_a_backward_pass_inside_the_forward_is_seen_in_every_step(times):
    model, x = Force(times), torch.randn(5, 3)
    expected, passes = gradient_norm(model, x)
    assert passes == 2 * times
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with th.watch(model, steps="call", of=("values", "gradients")) as watch:
            for step in range(4):
                model(leaf(x)).backward()
                watch.step()
                assert watch.row("first", "gradients")["last"]["norm"] == pytest.approx(expected, rel=1e-5), step


SURE = "a backward pass ran inside a call of the model, for the first time in step {}"
PERHAPS = "a backward pass that did not start at the model's output ran during or after the model's call in step {}"


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(("steps", "told"), [(2, SURE), (3, PERHAPS), (9, PERHAPS)])
def test_one_that_comes_as_a_surprise_is_reported_and_seen_from_then_on(steps, told):
    model, x = Force(), torch.randn(5, 3)
    expected, _ = gradient_norm(model, x)
    model.derives = False
    with th.watch(model, steps="call", of=("values", "gradients")) as watch:
        for _ in range(steps):
            model(leaf(x)).backward()
            watch.step()
        model.derives = True
        with pytest.warns(th.TenterhookWarning, match=told.format(steps)):
            model(leaf(x)).backward()
        watch.step()
        for _ in range(2):
            model(leaf(x)).backward()
            watch.step()
            assert watch.row("first", "gradients")["last"]["norm"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("_way")
def test_passes_of_another_model_in_every_step_are_no_surprise():
    model, other, x = Force(), Force(), torch.randn(5, 3)
    model.derives = False
    expected, _ = gradient_norm(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with th.watch(model, steps="manual", of=("values", "gradients")) as watch:
            for _ in range(6):
                other(leaf(x)).backward()
                model(leaf(x)).backward()
                watch.step()
                assert watch.row("first", "gradients")["last"]["norm"] == pytest.approx(expected, rel=1e-5)
    assert watch._deferred_hooks._asks


@pytest.mark.usefixtures("_way")
def test_where_there_are_no_others_a_pass_is_made_to_ask_in_the_first_steps_alone(monkeypatch):
    model, x, asked = Force(), torch.randn(5, 3), []
    model.derives = False
    monkeypatch.setattr(step_events, "new_backward_id", lambda: asked.append(1) or passes())
    with th.watch(model, steps="manual", of=("values", "gradients")) as watch:
        for _ in range(6):
            model(leaf(x)).backward()
            watch.step()
    assert len(asked) == 6


class Field(Force):
    """One that gives the derivative itself, in which no backward pass begins any more."""

    def forward(self, x):
        energy = self.second(torch.tanh(self.first(x))).sum()
        return torch.autograd.grad(energy, x)[0] if self.derives else energy


@pytest.mark.usefixtures("_way")
def test_one_inside_the_forward_is_reported_also_if_none_follows():
    model, x = Field(), torch.randn(5, 3)
    model.derives = False
    with th.watch(model, steps="call", of=("values", "gradients")) as watch:
        for _ in range(6):
            model(leaf(x)).backward()
        model.derives = True
        model(leaf(x))
        with pytest.warns(th.TenterhookWarning, match=PERHAPS.format(6)):
            model(leaf(x))
        model(leaf(x))
    assert list(watch.series("first", "norm", "gradients")) == [0, 1, 2, 3, 4, 5, 7, 8]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("calls", [1, 2])
def test_the_passes_of_steps_between_are_no_surprise(calls):
    model, x = Force(), torch.randn(5, 3)
    model.derives = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with th.watch(model, steps="manual", of=("values", "gradients"), every=3) as watch:
            for _ in range(20):
                for _ in range(calls):
                    model(leaf(x)).backward()
                watch.step()
    assert watch._deferred_hooks._lasts
    assert len(watch.series("first", "norm", "gradients")) == 7


@pytest.mark.usefixtures("_way")
def test_one_inside_the_forward_is_reported_also_after_steps_between():
    model, x = Force(), torch.randn(5, 3)
    model.derives = False
    with th.watch(model, steps="manual", of=("values", "gradients"), every=2) as watch:
        for step in range(10):
            model.derives = step >= 8
            with pytest.warns(th.TenterhookWarning, match=SURE.format(8)) if step == 8 else contextlib.nullcontext():
                model(leaf(x)).backward()
            watch.step()


@pytest.mark.usefixtures("_way")
def test_who_asks_for_no_gradients_is_not_given_any():
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
        for _ in range(3):
            model(leaf(x)).backward()
            watch.step()
        model.first(x).pow(2).sum().backward()
        watch.step()
        expected = torch.linalg.vector_norm(2 * model.first(x))
        assert watch.row("first", "gradients")["last"]["norm"] == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.usefixtures("_way")
def test_a_call_that_fails_leaves_nothing_that_disturbs_the_next(monkeypatch):
    model, x = Force(), torch.randn(5, 3)
    model.derives = False
    expected, _ = gradient_norm(model, x)
    with th.watch(model, of=("values", "gradients"), steps="manual") as watch:
        for _ in range(3):
            model(leaf(x)).backward()
            watch.step()
        with monkeypatch.context() as broken:
            broken.setattr(torch, "tanh", lambda found: found[:, 1:])
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(leaf(x))
        watch.step()
        assert watch.row("first")["last"]["step"] == 3
        model(leaf(x)).backward()
        watch.step()
        assert watch.row("first", "gradients")["last"]["norm"] == pytest.approx(expected, rel=1e-5)
        assert watch.row("second", "gradients")["last"]["count"] == 5


class Shortcut(nn.Module):
    """What is made anew in every call, or, where told so, what there was before it."""

    def __init__(self):
        super().__init__()
        self.gives = "its own"
        self.kept = torch.ones(5, 8, requires_grad=True)

    def forward(self, x, *, other):
        return {"its own": x * 2, "its input": x, "another": other, "a leaf": self.kept}[self.gives]


class Around(nn.Module):
    """A model with such a part, whose input is used once more beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.part, self.last = nn.Linear(3, 8), Shortcut(), nn.Linear(8, 1)

    def forward(self, x):
        x, other = self.first(x), torch.tanh(self.first(x + 1))
        return (self.last(self.part(x, other=other)) + x.sum() + other.sum()).sum()


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("gives", ["its own", "its input", "another", "a leaf"])
def test_a_part_that_returns_its_input_has_the_gradient_of_this_use_alone(gives):
    model, x = Around(), torch.randn(5, 3)
    through = torch.linalg.vector_norm(model.last.weight.detach().expand(5, 8))
    model.part.gives = gives
    with th.watch(model, of=("values", "gradients"), steps="manual") as watch:
        for _ in range(5):
            model(x).backward()
            watch.step()
            found = watch.row("part", "gradients")["last"]["norm"]
            assert found == pytest.approx(float(through), rel=1e-5)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("gives", ["another", "a leaf"])
def test_one_that_did_not_do_so_before_is_reported(gives):
    model, x = Around(), torch.randn(5, 3)
    through = torch.linalg.vector_norm(model.last.weight.detach().expand(5, 8))
    with th.watch(model, of=("values", "gradients"), steps="manual") as watch:
        for _ in range(4):
            model(x).backward()
            watch.step()
        model.part.gives = gives
        with pytest.warns(th.TenterhookWarning, match="'part' returned a tensor that existed before its call"):
            model(x).backward()
        watch.step()
        assert watch.row("part", "gradients")["last"]["step"] == 3, "nothing is told of that step"
        assert watch.row("part")["last"]["step"] == 4
        for step in range(5, 12):
            model.part.gives = gives if step % 3 else "its own"  # It may do so in some steps and not in others.
            model(x).backward()
            watch.step()
            last = watch.row("part", "gradients")["last"]
            assert (last["step"], last["norm"]) == (step, pytest.approx(float(through), rel=1e-5))


@pytest.mark.usefixtures("_way")
def test_a_dropout_that_is_switched_off_returns_its_input_silently():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    x = torch.randn(5, 3)
    through = torch.linalg.vector_norm(model[2].weight.detach().expand(5, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with th.watch(model, of=("values", "gradients"), steps="manual") as watch:
            for step in range(8):
                model.train(step < 4)
                model(x).sum().backward()
                watch.step()
                assert watch.row("1", "gradients")["last"]["norm"] == pytest.approx(float(through), rel=1e-5)


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

    def spied(each, *args):
        asked.extend([tensor.data_ptr() for tensor in wanted.tensors] for wanted in each)
        return measure_together(each, *args)

    measure_together = measured_batch.measure_together
    monkeypatch.setattr(measured_batch, "measure_together", spied)
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
