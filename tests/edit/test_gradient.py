"""Edits of gradients, each against the same computation with the edit written out."""

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import Residual, untouched

X = torch.arange(12.0).view(4, 3) / 7 - 0.8


def then(value, use):
    return use(value)


class Edited(torch.autograd.Function):
    """The truth: an operation that changes nothing but the gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


class Model(nn.Module):
    """A model whose forward is a function of its parts, so that a test can show it whole."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.run(self, x)


def part(run):
    return Model(lambda self, x: run(x))


def same(one, other):
    assert torch.equal(one, other), (one, other)


def clip(gradient):
    return gradient.clamp(-0.1, 0.1)


def edited_and_true(run, truth, **edits):
    """The gradient of the input under an edit session, and that of the unrolled computation."""
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    with untouched(run), th.edit(run, grad=edits):
        run(x).backward()
    truth(y).backward()
    return x.grad, y.grad


def test_the_gradient_of_an_output_is_replaced_on_its_way():
    model = Model(lambda self, x: self.a(x * 2).pow(2).sum(), a=part(torch.tanh))
    same(*edited_and_true(model, lambda x: Edited.apply((x * 2).tanh(), clip).pow(2).sum(), a=clip))


def test_the_gradient_of_an_input_is_replaced_only_as_it_comes_through_the_module():
    model = Model(lambda self, x: then(x * 2, lambda h: (self.a(h) + h * 5).pow(2).sum()), a=part(torch.tanh))

    def truth(x):
        h = x * 2
        return (Edited.apply(h, clip).tanh() + h * 5).pow(2).sum()

    same(*edited_and_true(model, truth, **{"a:in": clip}))


@pytest.mark.parametrize("point", ["a", "a:in"])
def test_a_module_that_returns_its_input_leaves_the_other_uses_alone(point):
    model = Model(lambda self, x: then(x * 2, lambda h: (self.a(h) * 3 + h * 5).pow(2).sum()), a=nn.Identity())

    def truth(x):
        h = x * 2
        return (Edited.apply(h, clip) * 3 + h * 5).pow(2).sum()

    same(*edited_and_true(model, truth, **{point: clip}))


@pytest.mark.parametrize("point", ["a", "a:in"])
def test_an_in_place_operation_after_a_module_that_returns_its_input_does_not_lose_the_edit(point):
    model = Model(lambda self, x: self.a(x * 2).mul_(3).pow(2).sum(), a=nn.Identity())
    same(*edited_and_true(model, lambda x: (Edited.apply(x * 2, clip) * 3).pow(2).sum(), **{point: clip}))


def test_a_view_that_is_changed_in_place_later_is_edited_and_its_base_follows():
    kept = {}

    def a(x):
        kept["base"] = x * 2
        return kept["base"][:, 1:]

    def run(self, x):
        view = self.a(x)
        early = view.sum()
        view.mul_(3)
        return early + (kept.pop("base") * torch.arange(12.0).view(4, 3)).sum()

    def truth(x):
        base = x * 2
        view = Edited.apply(base[:, 1:], clip)
        whole = torch.cat([base[:, :1], view * 3], 1)
        return view.sum() + (whole * torch.arange(12.0).view(4, 3)).sum()

    same(*edited_and_true(Model(run, a=part(a)), truth, a=clip))


def test_a_view_that_cannot_be_distinguished_is_an_error_that_names_the_point():
    kept = {}

    def a(x):
        kept["base"] = x * 2
        return kept["base"].expand(2, -1, -1)

    def run(self, x):
        view = self.a(x)
        kept.pop("base").mul_(3)
        return view.sum()

    with (
        pytest.raises(th.EditError, match=r"'a'.*same memory"),
        th.edit(model := Model(run, a=part(a)), grad={"a": clip}),
    ):
        model(X.clone().requires_grad_()).backward()


def test_a_module_that_changes_its_input_in_place_is_edited_at_the_old_value():
    class InPlace(nn.Module):
        def forward(self, x):
            x.mul_(3)
            return x.tanh()

    def run(self, x):
        h = x * 2
        before = (h * 7).sum()
        return before + self.a(h).sum() + h.pow(2).sum()

    def truth(x):
        h = x * 2
        new = Edited.apply(h, clip) * 3
        return (h * 7).sum() + new.tanh().sum() + new.pow(2).sum()

    torch.testing.assert_close(*edited_and_true(Model(run, a=InPlace()), truth, **{"a:in": clip}), rtol=1e-6, atol=1e-6)


def test_a_change_in_place_that_gave_no_sign_is_an_error_and_never_a_lost_edit():
    change = torch.Tensor.mul_
    model = Model(lambda self, x: self.a(x * 2).sum(), a=part(lambda x: change(x, 3).tanh()))
    with pytest.raises(th.EditError, match=r"'a:in'.*in place"), th.edit(model, grad={"a:in": clip}):
        model(X.clone().requires_grad_()).backward()


def test_edits_apply_in_the_order_of_their_sessions_and_records_see_what_flows_on():
    model = Model(lambda self, x: self.a(x * 2).pow(2).sum(), a=part(torch.tanh))
    for point in ("a", "a:in"):
        with (
            th.record(model, point, grad=True) as outer,
            th.edit(model, grad={point: lambda g: g * 10}),
            th.edit(model, grad={point: [lambda g: g + 1, lambda g: g * 2]}),
            th.record(model, point, grad=True) as inner,
        ):
            x = X.clone().requires_grad_()
            model(x).backward()
        with th.record(model, point, grad=True) as plain:
            model(X.clone().requires_grad_()).backward()
        expected = (plain.grad[point] * 10 + 1) * 2
        same(outer.grad[point], expected)
        same(inner.grad[point], expected)


@pytest.mark.parametrize("first", ["record", "edit"])
def test_a_recorded_parameter_gradient_is_the_edited_one_whichever_session_came_first(first):
    model = nn.Linear(3, 1)
    record, edit = th.record(model, "weight", grad=True), th.edit(model, grad={"weight": lambda g: g * 10})
    sessions = (record, edit) if first == "record" else (edit, record)
    with untouched_but_gradients(model), sessions[0], sessions[1]:
        model(X).sum().backward()
    same(record.tape.grad["weight"], model.weight.grad)
    same(model.weight.grad, X.sum(0, keepdim=True) * 10)


def untouched_but_gradients(model):
    class Context:
        def __enter__(self):
            self.hooks = [p._backward_hooks for p in model.parameters()]

        def __exit__(self, *_):
            assert [p._backward_hooks for p in model.parameters()] == self.hooks

    return Context()


def test_a_parameter_gradient_is_edited_before_or_after_it_is_accumulated():
    model = nn.Linear(3, 1)
    model(X).sum().backward()
    before = model.weight.grad.clone()
    with th.edit(model, grad={"weight": lambda g: g * 2}):
        model(X).sum().backward()
    same(model.weight.grad, before + before * 2)
    with th.edit(model, accumulated={"weight": lambda g: g * 0 + 7}):
        model(X).sum().backward()
    same(model.weight.grad, torch.full((1, 3), 7.0))


def test_value_edits_and_gradient_edits_of_one_point_compose():
    model = Model(lambda self, x: self.a(x * 2).pow(2).sum(), a=part(torch.tanh))
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    with th.edit(model, {"a": lambda v: v * 3}, grad={"a": clip}):
        model(x).backward()
    Edited.apply((y * 2).tanh() * 3, clip).pow(2).sum().backward()
    same(x.grad, y.grad)


def test_one_part_of_a_structure_can_be_meant():
    model = Model(
        lambda self, x: then(self.a(x), lambda y: y[0].pow(2).sum() + y[1].pow(3).sum()),
        a=part(lambda x: (x * 2, x * 3)),
    )
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    with th.edit(model, grad={"a": th.scale(0.5, part=1)}):
        model(x).backward()
    ((y * 2).pow(2).sum() + Edited.apply(y * 3, lambda g: g * 0.5).pow(3).sum()).backward()
    same(x.grad, y.grad)


def test_the_toy_residual_block_with_its_in_place_sums_is_edited_right():
    model = Residual(3)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    with th.edit(model, grad={"norm2": clip, "norm1:in": clip}):
        model(x).pow(2).sum().backward()
    h = model.norm1(Edited.apply(y, clip)).relu()
    (Edited.apply(model.norm2(h), clip) + y).relu().pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda g: g[:2], r"'0', call #0.*float32\[4, 3\] into float32\[2, 3\]"),
        (lambda g: g.double(), r"'0'.*float64"),
        (lambda g: g.to("meta"), r"'0'.*meta"),
    ],
)
def test_a_replacement_of_another_kind_is_an_error_that_names_the_point(change, said):
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(th.EditError, match=said), th.edit(model, grad={"0": change}):
        model(X).pow(2).sum().backward()
    assert "forward" not in vars(model[0])


def test_changing_the_gradient_in_place_is_refused_because_others_may_share_it():
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(th.EditError, match=r"'0'.*in place"), th.edit(model, grad={"0": lambda g: g.mul_(2)}):
        model(X).pow(2).sum().backward()


def test_an_error_in_an_edit_says_where_it_was_and_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(3, 3))

    def broken(gradient):
        raise ZeroDivisionError

    with untouched(model), pytest.raises(ZeroDivisionError) as caught, th.edit(model, grad={"0": broken}):
        model(X).sum().backward()
    assert any("broken at '0', call #0" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda m: m(X).sum(), "no gradient flowed back"),
        (lambda m: torch.no_grad()(m)(X), "no_grad"),
        (lambda m: torch.inference_mode()(m)(X), "inference_mode"),
    ],
)
def test_an_edit_of_a_gradient_that_never_flows_says_why(run, said):
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(th.NeverReached, match=said), th.edit(model, grad={"0": clip}):
        run(model)


def test_an_edit_where_there_is_no_float_says_so():
    model = nn.Sequential(part(lambda x: x.argmax(-1)), nn.Embedding(3, 2))
    with pytest.raises(th.NeverReached, match="no floating-point tensor"), th.edit(model, grad={"0": clip}):
        model(X).sum().backward()


def test_an_edit_of_a_parameter_gradient_that_never_flows_says_why():
    model = Model(lambda self, x: self.a(x).sum(), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    with pytest.raises(th.NeverReached, match="no gradient flowed back"), th.edit(model, grad={"b.weight": clip}):
        model(X).backward()


def test_a_frozen_parameter_cannot_be_edited_and_nothing_is_installed():
    model = nn.Linear(3, 3).requires_grad_(requires_grad=False)
    with untouched(model), pytest.raises(th.EditError, match="requires no gradient"):
        th.edit(model, grad={"weight": clip}).start()


def test_double_backward_goes_through_an_edit_as_through_a_hook_of_pytorch():
    model = Model(lambda self, x: self.a(x * 2).pow(3).sum(), a=part(torch.tanh))
    x, y = (X.double().requires_grad_() for _ in range(2))
    with th.edit(model, grad={"a": lambda g: g * g}):
        (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
        (mine,) = torch.autograd.grad(slope.sum(), x)
    h = (y * 2).tanh()
    h.register_hook(lambda g: g * g)
    (slope,) = torch.autograd.grad(h.pow(3).sum(), y, create_graph=True)
    same(mine, torch.autograd.grad(slope.sum(), y)[0])
