"""torch.func: what is recorded inside a transform is the whole value, edits take effect, the rest is refused."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import tenterhook as th
from tenterhook.testing import untouched

# The first jvp of a process scripts something of PyTorch's own.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

X = torch.linspace(-1, 1, 15).reshape(5, 3)


def mlp(activation=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 2))


def loss_of(model):
    return lambda parameters, x: functional_call(model, parameters, (x,)).sum()


def parameters_of(model):
    return dict(model.named_parameters())


COPIES = pytest.mark.parametrize("copy", ["auto", "always"])


@COPIES
def test_vmap_records_all_examples_along_the_first_dimension(copy):
    model = mlp()
    with untouched(model), th.record(model, "0", "2", copy=copy) as tape:
        vmap(model, out_dims=1)(X)
    assert torch.allclose(tape["0"], model[0](X))
    assert torch.allclose(tape["2"], model(X))
    assert not tape["2"].requires_grad


@COPIES
def test_of_nested_vmaps_the_outer_one_comes_first(copy):
    model, x = mlp(), torch.randn(2, 5, 3)
    with th.record(model, "2", copy=copy) as tape:
        vmap(vmap(model, in_dims=1), in_dims=2)(x.permute(2, 1, 0))
    assert tape["2"].shape == (2, 5, 2)
    assert torch.allclose(tape["2"], model(x), atol=1e-6)


@COPIES
@pytest.mark.parametrize("inner", ["grad", "jvp", "jacrev", "vmap of grad"])
def test_every_transform_records_what_the_plain_model_has(inner, copy):
    model = mlp()
    runs = {
        "grad": lambda: grad(loss_of(model))(parameters_of(model), X),
        "jvp": lambda: jvp(model, (X,), (torch.ones_like(X),)),
        "jacrev": lambda: jacrev(model)(X),
        "vmap of grad": lambda: vmap(grad(loss_of(model)), (None, 0))(parameters_of(model), X),
    }
    with th.record(model, "0", "1:in", copy=copy) as tape:
        runs[inner]()
    assert torch.allclose(tape["0"], model[0](X), atol=1e-6)
    assert torch.allclose(tape["1:in"], model[0](X), atol=1e-6)


def test_a_change_in_place_inside_vmap_does_not_reach_the_tape():
    class Adds(nn.Module):
        def forward(self, x):
            return getattr(x, "add" + "_")(1)  # No sign of it in the source.

    model = nn.Sequential(nn.Linear(3, 4), Adds())
    for copy in ("auto", "always"):
        with th.record(model, "0", copy=copy) as tape:
            vmap(model)(X)
        assert torch.allclose(tape["0"], model[0](X))


def test_a_tape_is_read_after_the_transform_not_in_it():
    model = mlp()

    def reads(x):
        with th.record(model, "0") as tape:
            y = model(x)
        return y + tape["0"].sum()

    with pytest.raises(th.TapeError, match="after the transform"):
        vmap(reads)(X)


def test_stop_inside_a_transform_ends_the_block():
    model = mlp()
    with th.record(model, "0", stop=True) as tape:
        vmap(model)(X)
    assert torch.allclose(tape["0"], model[0](X))
    assert torch.allclose(vmap(model)(X), model(X))


def test_gradients_inside_grad_are_those_of_backward():
    model = mlp()
    with th.record(model, "0", "1", grad=True) as wanted:
        model(X).sum().backward()
    with th.record(model, "0", "1", grad=True) as tape:
        grad(loss_of(model))(parameters_of(model), X)
    with th.record(model, "0", "1", grad=True) as each:
        vmap(grad(loss_of(model)), (None, 0))(parameters_of(model), X)
    for name in ("0", "1"):
        assert torch.allclose(tape.grad[name], wanted.grad[name])
        assert torch.allclose(each.grad[name], wanted.grad[name])


@pytest.mark.parametrize("run", [lambda m: vmap(m)(X), lambda m: jvp(m, (X,), (X,))])
def test_a_transform_that_differentiates_nothing_back_has_no_gradients(run):
    model = mlp()
    with th.record(model, "0", grad=True) as tape:
        run(model)
    with pytest.raises(th.GradientError, match=r"torch\.func"):
        tape.grad["0"]
    with pytest.raises(th.NeverReached, match=r"torch\.func"), th.edit(model, grad={"0": th.zero()}):
        run(model)


@pytest.mark.parametrize("edit", [th.zero(at=th.at[..., :2]), th.scale(2.0), lambda v: v + 1])
def test_edits_inside_transforms_take_effect(edit):
    model = mlp()
    with th.edit(model, {"1": edit}):
        wanted = model(X)
        wanted.sum().backward()
        assert torch.allclose(vmap(model)(X), wanted)
        found = grad(loss_of(model))(parameters_of(model), X)
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad if parameter.grad is not None else torch.zeros(()))


def test_edits_of_gradients_inside_grad_take_effect():
    model = mlp()
    with th.edit(model, grad={"1": lambda g: g * 3}):
        model(X).sum().backward()
        found = grad(loss_of(model))(parameters_of(model), X)
    assert all(torch.allclose(found[name], parameter.grad) for name, parameter in model.named_parameters())


def test_an_edit_of_an_arguments_gradient_inside_grad_is_refused():
    model = mlp()
    with pytest.raises(th.GradientError, match=r"transform of torch\.func"), th.edit(model, grad={"1:in": th.zero()}):
        grad(loss_of(model))(parameters_of(model), X)


def test_functional_call_is_recorded_and_edited_with_the_parameters_that_it_was_given():
    model = mlp()
    given = {name: parameter * 2 for name, parameter in model.named_parameters()}
    wanted = functional_call(model, given, (X,))
    with untouched(model):
        with th.record(model, "2", "2.bias") as tape:
            functional_call(model, given, (X,))
        with th.edit(model, {"2.bias": th.zero()}):
            found = functional_call(model, given, (X,))
    assert torch.equal(tape["2"], wanted)
    assert torch.equal(tape["2.bias"], model[2].bias)  # The point is the model's own parameter.
    assert torch.equal(found, functional_call(model, given | {"2.bias": torch.zeros(2)}, (X,)))
