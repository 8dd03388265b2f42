"""Backward hooks where PyTorch's hooks fail, warn or are not called, compared with gradients written out."""

import dataclasses

import pytest
import torch
from hook_toys import Run, X, then, x_leaf
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook import hooks
from tenterhook.testing import Residual, no_leak, untouched


class InPlace(nn.Module):
    def forward(self, x):
        x.mul_(3)
        return x.tanh()


@dataclasses.dataclass
class Out:
    one: torch.Tensor
    other: torch.Tensor


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def use_relu_after(part, x):
    return part(x).relu_().pow(2)


# Each case: the module, the code around it, and both again without in-place operations.
CASES = {
    "in place before": (
        nn.Tanh,
        lambda f, x: f((x * 2).mul_(3)).pow(2),
        lambda x: x.tanh(),
        lambda f, x: f(x * 6).pow(2),
    ),
    "in place in it": (
        InPlace,
        lambda f, x: f(x * 2) + 1,
        lambda x: (x * 3).tanh(),
        lambda f, x: f(x * 2) + 1,
    ),
    "in place after": (lambda: nn.Linear(3, 3), use_relu_after, None, lambda f, x: f(x).relu().pow(2)),
    "in place around": (
        lambda: Run(lambda x: x.mul_(3)),
        lambda f, x: f(x * 2).relu_() + 0,
        lambda x: x * 3,
        lambda f, x: f(x * 2).relu(),
    ),
    "a view": (
        lambda: Run(lambda x: x[:, 1:]),
        lambda f, x: f(x * 2).mul_(3).pow(2),
        lambda x: x[:, 1:],
        lambda f, x: (f(x * 2) * 3).pow(2),
    ),
    "flatten": (nn.Flatten, lambda f, x: f(x * 2).relu_(), lambda x: x.flatten(1), lambda f, x: f(x * 2).relu()),
    "identity": (
        nn.Identity,
        lambda f, x: then(x * 2, lambda h: f(h) * 2 + h * 5),
        lambda x: x,
        lambda f, x: then(x * 2, lambda h: f(h) * 2 + h * 5),
    ),
    "identity, in place": (nn.Identity, lambda f, x: f(x * 2).relu_(), lambda x: x, lambda f, x: f(x * 2).relu()),
    "dict": (
        lambda: Run(lambda x: {"a": x * 2, "b": x * 3}),
        lambda f, x: then(f(x), lambda y: y["a"].relu_() * y["b"]),
        lambda x: {"a": x * 2, "b": x * 3},
        lambda f, x: then(f(x), lambda y: y["a"].relu() * y["b"]),
    ),
    "list": (
        lambda: Run(lambda x: [x * 2]),
        lambda f, x: f(x)[0].relu_(),
        lambda x: [x * 2],
        lambda f, x: f(x)[0].relu(),
    ),
    "dataclass": (
        lambda: Run(lambda x: Out(x * 2, x * 3)),
        lambda f, x: f(x).other.pow(2),
        lambda x: Out(x * 2, x * 3),
        lambda f, x: f(x).other.pow(2),
    ),
    "nested": (
        lambda: Run(lambda x: ((x * 2, [x * 3]), None)),
        lambda f, x: then(f(x), lambda y: y[0][0] * y[0][1][0]),
        lambda x: ((x * 2, [x * 3]), None),
        lambda f, x: then(f(x), lambda y: y[0][0] * y[0][1][0]),
    ),
    "keyword": (
        lambda: Run(lambda *, x: x.tanh()),
        lambda f, x: f(x=x * 2),
        lambda *, x: x.tanh(),
        lambda f, x: f(x=x * 2),
    ),
    "disjoint views": (
        lambda: Run(lambda x: then(x * 2, lambda h: (h[:, :1], h[:, 1:]))),
        lambda f, x: then(f(x), lambda y: y[0].mul_(3) * y[1]),
        lambda x: then(x * 2, lambda h: (h[:, :1], h[:, 1:])),
        lambda f, x: then(f(x), lambda y: y[0] * 3 * y[1]),
    ),
}


def tensors_of(value):
    from tenterhook._tree import tensors

    return [tensor for _, tensor in tensors(value)]


@pytest.mark.parametrize("case", CASES)
def test_grad_input_and_grad_output_are_the_true_ones(case):
    make, use, plain, use_plain = CASES[case]
    module, log = make(), []
    handles = [
        hooks.register_backward_pre_hook(module, lambda module, outgoing: log.append(("pre", outgoing))),
        hooks.register_backward_hook(module, lambda module, i, o: log.append(("post", i, o))),
    ]
    x, y = x_leaf(), x_leaf()
    with untouched(module):
        use(module, x).sum().backward()
        module.zero_grad()

    seen = {}

    def unrolled(*args, **kwargs):
        own = [a.clone() for a in (*args, *kwargs.values())]
        out = (plain or module)(*own) if args else plain(**dict(zip(kwargs, own, strict=True)))
        seen["in"], seen["out"] = own, tensors_of(out)
        if plain is not None and case.startswith("identity"):
            out = out.clone()
            seen["out"] = [out]
        return out

    for handle in handles:
        handle.remove()
    loss = use_plain(unrolled, y).sum()
    truth = [torch.autograd.grad(loss, seen[key], retain_graph=True, allow_unused=True) for key in ("in", "out")]
    loss.backward()
    same(x.grad, y.grad)
    assert [entry[0] for entry in log] == ["pre", "post"]
    incoming, outgoing = log[1][1:]
    assert len(incoming) == len(truth[0])
    for mine, true in zip(incoming, truth[0], strict=True):
        same(mine, true)
    found = [g for g in outgoing if g is not None]
    expected = [g for g in truth[1] if g is not None]
    assert len(found) == len(expected)
    for mine, true in zip(found, expected, strict=True):
        same(mine, true)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


@pytest.mark.parametrize("case", CASES)
def test_what_the_hooks_return_takes_effect(case):
    make, use, *_ = CASES[case]
    module = make()
    hooks.register_backward_pre_hook(module, lambda m, outgoing: tuple(None if g is None else g * 0 for g in outgoing))
    hooks.register_backward_hook(module, lambda m, incoming, _: tuple(None if g is None else g + 1 for g in incoming))
    x = x_leaf()
    use(module, x).sum().backward()
    factor = {"in place before": 6, "identity": 2, "flatten": 2, "a view": 2, "keyword": 2, "in place in it": 2}
    factor |= {"in place around": 2, "identity, in place": 2}
    rest = 10 if case == "identity" else 0
    same(x.grad, torch.full_like(X, factor.get(case, 1) + rest))


def test_outputs_that_overlap_and_change_in_place_later_are_an_error():
    module = Run(lambda x: then(x * 2, lambda h: (h, h[:, 0])))
    hooks.register_backward_hook(module, lambda *_: None)
    whole, part = module(x_leaf())
    whole.mul_(3)
    with pytest.raises(th.HookError, match="share memory"):
        (whole.sum() + part.sum()).backward()


def test_an_input_that_is_changed_in_place_without_a_sign_in_the_code_has_its_true_gradient():
    change, log = torch.Tensor.mul_, []
    module = Run(lambda x: change(x, 3).tanh())
    hooks.register_backward_hook(module, lambda m, i, o: log.append((i[0], o[0])))
    module(x_leaf() * 2).sum().backward()
    same(log[0], (3 * (1 - (X * 6).tanh().pow(2)), torch.ones_like(X)))


def test_a_wrong_number_of_gradients_is_an_error_that_names_the_hook():
    module = nn.Linear(3, 2)

    def wrong(module, incoming, outgoing):
        return incoming * 2

    hooks.register_backward_hook(module, wrong)
    with pytest.raises(th.HookError, match=r"wrong returned 2 gradients for grad_input, which has 1"):
        module(x_leaf()).sum().backward()


@pytest.mark.parametrize("kind", ["backward", "backward_pre", "tensor"])
def test_an_error_in_a_hook_surfaces_with_a_note_that_names_the_hook(kind):
    module, x = nn.Linear(3, 2), x_leaf()

    def broken(*_):
        raise ZeroDivisionError

    y = module(x)
    if kind == "tensor":
        hooks.register_hook(y, broken)
    else:
        getattr(hooks, f"register_{kind}_hook")(module, broken)
        y = module(x)
    with pytest.raises(ZeroDivisionError) as caught:
        y.sum().backward()
    assert any("broken" in note for note in caught.value.__notes__)


def test_an_error_in_forward_leaves_no_hook_of_that_call_behind():
    calls = []

    def run(x):
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError
        return x * 2

    module, log = Run(run), []
    handle = hooks.register_backward_hook(module, lambda *_: log.append(1))
    before = len(module._forward_hooks)
    with pytest.raises(ZeroDivisionError):
        module(x_leaf())
    assert len(module._forward_hooks) == before
    module(x_leaf()).sum().backward()
    assert log == [1]
    handle.remove()
    assert not module._forward_hooks


def test_a_module_that_calls_itself_has_a_passage_for_each_call():
    log = []

    class Again(nn.Module):
        def forward(self, x, depth=2):
            return x * 2 if depth == 0 else self(x * 3, depth - 1)

    module = Again()
    hooks.register_backward_hook(module, lambda m, i, o: log.append((i[0][0, 0].item(), o[0][0, 0].item())))
    module(x_leaf()).sum().backward()
    assert log == [(2.0, 1.0), (6.0, 1.0), (18.0, 1.0)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_calls_the_hooks_once(reentrant):
    module, log = nn.Linear(3, 3), []
    hooks.register_backward_hook(module, lambda m, i, o: log.append((i, o)))
    x = x_leaf()
    checkpoint(lambda x: module(x).relu_(), x * 2, use_reentrant=reentrant).sum().backward()
    assert len(log) == 1
    own = (X * 2).requires_grad_()
    h = module(own)
    truth = torch.autograd.grad(h.relu().sum(), (own, h))
    same(log[0][0][0], truth[0])
    same(log[0][1][0], truth[1])


@pytest.mark.parametrize("register", [hooks.register_backward_hook, nn.Module.register_full_backward_hook])
def test_passes_that_start_inside_the_module_call_no_hook(register):
    module, log, x = nn.Tanh(), [], x_leaf()
    register(module, lambda m, i, o: log.append(i[0].detach().clone()))
    y = module(x * 2).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    slope.sum().backward(retain_graph=True)
    h = (X * 2).tanh()
    same(log[0], 1 - h.pow(2))
    same(x.grad, 2 * (-2 * h * (1 - h.pow(2))) * 2)
    y.backward()
    assert len(log) == 2


def test_hooks_and_sessions_stand_together():
    model, log = Residual(3), []
    hooks.register_backward_hook(model.norm2, lambda m, i, o: log.append((i[0], o[0])))
    with th.record(model, "norm2", "norm2:in", grad=True) as tape, th.edit(model, grad={"norm2": lambda g: g * 2}):
        model(X).sum().backward()
    same(log[0][0], tape.grad["norm2:in"])
    same(log[0][1], tape.grad["norm2"] / 2)


def test_under_no_grad_nothing_is_done():
    module = nn.Linear(3, 2)
    hooks.register_backward_hook(module, lambda *_: 1 / 0)
    with torch.no_grad():
        same(module(X), nn.functional.linear(X, module.weight, module.bias))


def test_hooked_steps_leave_no_tensor():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), Run(lambda x: (x * 2, x * 3)))
    for part in module:
        hooks.register_backward_hook(part, lambda *_: None)

    def step():
        a, b = module(x_leaf())
        (a.mul_(2) + b).sum().backward()
        module.zero_grad()

    step()
    with no_leak():
        for _ in range(5):
            step()


def test_under_transforms_of_torch_func_gradients_are_those_without_hooks():
    module = nn.Linear(3, 3)
    plain = torch.func.grad(lambda x: module(x).tanh().sum())(X)
    hooks.register_backward_hook(module, lambda *_: None)
    same(torch.func.grad(lambda x: module(x).tanh().sum())(X), plain)
    same(torch.func.vmap(module)(X), module(X))
