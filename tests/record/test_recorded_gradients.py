"""Gradients of outputs, each against the same model unrolled by hand."""

import copy
import dataclasses
import io
import warnings

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import Cell, Mixed, Residual, untouched


class ViewLinear(nn.Linear):
    """Returns a view, as nn.Linear does for three dimensions before 2.15."""

    def forward(self, x):
        return super().forward(x.flatten(0, -2)).view(*x.shape[:-1], -1)


class Calls(nn.Module):
    """A model whose forward is a function of its parts and the input, so that a test can show it whole."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def recorded(model, *points, of, **options):
    with th.record(model, *points, grad=True, **options) as tape:
        of(model).backward()
    return tape.grad


def same(one, other):
    assert torch.equal(one, other), (one - other).abs().max()


X = torch.arange(12.0).view(4, 3) / 7 - 0.8


def test_a_chain_has_the_gradients_of_the_chain_written_out():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    a = model[0](X)
    b = torch.tanh(a)
    c = model[2](b)
    truth = torch.autograd.grad(c.pow(2).sum(), (a, b, c))
    grad = recorded(model, "*", of=lambda m: m(X).pow(2).sum())
    for index, expected in enumerate(truth):
        same(grad[str(index)], expected)


def test_recording_leaves_outputs_and_parameter_gradients_bitwise_as_they_are():
    model = Residual(3)
    plain = copy.deepcopy(model)
    plain(X).pow(2).sum().backward()
    with untouched(model), th.record(model, "**", "norm2:in", grad=True):
        out = model(X)
    out.pow(2).sum().backward()
    same(out, plain(X))
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine.grad, other.grad)


def test_an_output_that_is_changed_in_place_later_has_the_gradient_of_its_old_value():
    model = Residual(3)
    n1 = model.norm1(X)
    r1 = n1.clone().relu()
    n2 = model.norm2(r1)
    out = (n2 + X).relu()
    truth = torch.autograd.grad(out.pow(2).sum(), (n1, r1, n2))
    grad = recorded(model, "norm1", "relu#0", "norm2", of=lambda m: m(X).pow(2).sum())
    for name, expected in zip(("norm1", "relu#0", "norm2"), truth, strict=True):
        same(grad[name], expected)


def test_a_view_that_is_changed_in_place_by_a_forward_has_the_gradient_of_its_old_value():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(3, 3)

        def forward(self, x):
            y = self.part(x)
            y *= 3
            return y.sum()

    model = Model()
    same(recorded(model, "part", of=lambda m: m(X.view(2, 2, 3)))["part"], torch.full((2, 2, 3), 3.0))


def test_a_view_that_is_changed_in_place_later_has_the_gradient_of_its_old_value():
    def run(self, x):
        y = self.part(x)
        assert y._is_view()
        y += 1
        return y.relu_()

    model, x = Calls(run, part=ViewLinear(3, 3)), X.view(2, 2, 3)
    y = model.part(x)
    (truth,) = torch.autograd.grad((y + 1).relu().pow(2).sum(), y)
    same(recorded(model, "part", of=lambda m: m(x).pow(2).sum())["part"], truth)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced rows"])
def test_a_view_that_was_read_before_it_was_changed_has_both_gradients(layout):
    def base_of(x):
        whole = x * 2
        return whole.t().contiguous().t() if layout == "transposed" else whole

    def cut(base):
        return base[1:3] if layout == "sliced rows" else base[:, 1:]

    def run(self, x):
        view = self.part(x)
        early = (view * 3).sum()
        view.mul_(5)
        return early + view.pow(2).sum()

    model = Calls(run, part=Calls(lambda self, x: cut(base_of(x))))
    x = X.clone().requires_grad_()
    view = cut(base_of(x)).clone()
    (truth,) = torch.autograd.grad((view * 3).sum() + (view * 5).pow(2).sum(), view)
    same(recorded(model, "part", of=lambda m: m(x))["part"], truth)


def test_a_view_whose_base_changes_has_the_gradient_of_the_memory_it_shows():
    kept = {}

    def part(self, x):
        kept["base"] = x * 2
        return kept["base"][:, 0]

    def run(self, x):
        view = self.part(x)
        kept["base"].mul_(3)
        return view.pow(2).sum()

    x = X.clone().requires_grad_()
    grad = recorded(Calls(run, part=Calls(part)), "part", of=lambda m: m(x))
    view = (X * 2)[:, 0].clone().requires_grad_()
    (truth,) = torch.autograd.grad((view * 3).pow(2).sum(), view)
    same(grad["part"], truth)
    kept.clear()


def test_a_view_of_a_disjoint_part_is_not_disturbed_by_a_change_next_to_it():
    def run(self, x):
        left, right = self.part(x)
        late = (right * 7).sum()
        left += 1
        return late + left.pow(2).sum()

    def part(self, x):
        whole = x * 2
        return whole[:, :1], whole[:, 1:]

    x = X.clone().requires_grad_()
    left, right = recorded(Calls(run, part=Calls(part)), "part", of=lambda m: m(x))["part"]
    same(left, 2 * (X[:, :1] * 2 + 1))
    same(right, torch.full_like(right, 7))


def test_an_expanded_view_whose_base_changes_says_that_its_gradient_is_unknown():
    kept = {}

    def part(self, x):
        kept["base"] = x * 2
        return kept["base"].expand(5, -1, -1)

    def run(self, x):
        view = self.part(x)
        kept["base"].mul_(3)
        return view.sum()

    x = X.clone().requires_grad_()
    grad = recorded(Calls(run, part=Calls(part)), "part", of=lambda m: m(x))
    with pytest.raises(th.GradientError, match=r"'part'.*same memory more than once"):
        grad["part"]
    kept.clear()


def test_an_expanded_view_that_is_left_alone_has_its_own_gradient():
    model = Calls(lambda self, x: (self.part(x) * torch.arange(5.0).view(5, 1, 1)).sum(), part=Calls(
        lambda self, x: (x * 2).expand(5, -1, -1)))  # fmt: skip
    grad = recorded(model, "part", of=lambda m: m(X.clone().requires_grad_()))
    same(grad["part"], torch.arange(5.0).view(5, 1, 1).expand(5, 4, 3))


@dataclasses.dataclass
class Pair:
    one: torch.Tensor
    other: torch.Tensor | None
    name: str


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda a, b: {"a": a, "b": b, "n": 3}, lambda v: (v["a"], v["b"])),
        (lambda a, b: [a, None, b], lambda v: (v[0], v[2])),
        (lambda a, b: Pair(a, b, "pair"), lambda v: (v.one, v.other)),
        (lambda a, b: ((a, [b]), {"k": torch.arange(3)}), lambda v: (v[0][0], v[0][1][0])),
    ],
    ids=["dict", "list", "dataclass", "nested"],
)
def test_structures_keep_their_shape_and_have_none_where_nothing_flowed(pack, unpack):
    def run(self, x):
        a, _ = unpack(self.part(x))
        return a.relu_().sum()

    x = X.clone().requires_grad_()
    model = Calls(run, part=Calls(lambda self, x: pack(x * 2, x * 3)))
    grad = recorded(model, "part", of=lambda m: m(x))["part"]
    a, b = unpack(grad)
    same(a, (X > 0).float())
    assert b is None
    assert type(grad) is type(pack(X, X))


def test_a_module_that_returns_its_input_has_what_flows_back_to_its_output_alone():
    def run(self, x):
        h = self.first(x)
        return (self.same(h) * 2 + h * 5 + self.drop(h) * 11).sum()

    model = Calls(run, first=nn.Linear(3, 3), same=nn.Identity(), drop=nn.Dropout(0.5)).eval()
    grad = recorded(model, "*", "same:in", "drop:in", of=lambda m: m(X))
    one = torch.ones(4, 3)
    same(grad["same"], 2 * one)
    same(grad["same:in"], 2 * one)
    same(grad["drop"], 11 * one)
    same(grad["drop:in"], 11 * one)
    same(grad["first"], 18 * one)


def test_a_module_that_returns_its_input_may_be_followed_by_an_in_place_operation():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(3, 1))
    h = model[0](X)
    truth = torch.autograd.grad(model[3](h.relu()).sum(), h)[0]
    grad = recorded(model, "0", "1", "1:in", of=lambda m: m(X).sum())
    for point in ("0", "1", "1:in"):
        same(grad[point], truth)


def test_a_module_that_returns_a_parameter_or_a_leaf_has_a_gradient():
    class Prompt(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.weight

    model = Calls(lambda self, x: (x * self.prompt() + self.prompt.weight).sum(), prompt=Prompt())
    grad = recorded(model, "prompt", "prompt.weight", of=lambda m: m(X))
    same(grad["prompt"], X.sum(0))
    same(grad["prompt.weight"], X.sum(0) + 4)
    assert not model.prompt.weight._backward_hooks


def test_each_call_of_a_module_has_its_own_gradient():
    model, x = Cell(3), torch.randn(3, 2, 3)
    states = [torch.zeros(2, 3)]
    for step in x:
        states.append(model.cell(step, states[-1]))
    truth = torch.autograd.grad(states[-1].sum(), states[1:])
    grad = recorded(model, "cell", of=lambda m: m(x).sum())
    for mine, expected in zip(grad.calls("cell"), truth, strict=True):
        same(mine, expected)
    same(grad["cell#1"], truth[1])


def test_only_the_last_calls_are_kept_where_that_is_asked():
    model = nn.Linear(3, 3)
    with th.record(model, ":return", grad=True, keep=2) as tape:
        for factor in range(4):
            (model(X).sum() * factor).backward()
    assert list(tape.grad) == [":return#2", ":return#3"]
    same(tape.grad[":return#3"], torch.full((4, 3), 3.0))


def test_gradients_of_several_backward_passes_add_up_like_grad_does():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    h = model[0](X)
    h.retain_grad()
    y = torch.tanh(h)
    losses = [y.sum(), y.pow(2).sum(), y.exp().sum()]
    for loss in losses:
        loss.backward(retain_graph=True)
    with th.record(model, "0", grad=True) as tape:
        y = model(X)
        for loss in (y.sum(), y.pow(2).sum(), y.exp().sum()):
            loss.backward(retain_graph=True)
    same(tape.grad["0"], h.grad)


def test_double_backward_adds_what_the_second_pass_brings():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), X.clone().requires_grad_()

    def penalised(h):
        loss = torch.tanh(h).pow(3).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss, loss + slope.pow(2).sum()

    h = model[0](x)
    loss, total = penalised(h)
    (first,) = torch.autograd.grad(loss, h, retain_graph=True)
    (second,) = torch.autograd.grad(total, h)
    with th.record(model, "0", grad=True) as tape:
        penalised(model[0](x))[1].backward()
    same(tape.grad["0"], first + second)
    assert not tape.grad["0"].requires_grad


def test_autograd_grad_is_caught_also_where_the_point_itself_is_asked_for():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with th.record(model, "0", "1:in", grad="total") as tape:
        h = model[0](X)
        (truth,) = torch.autograd.grad(model[1](h).pow(2).sum(), h)
    same(tape.grad["0"], truth)
    same(tape.grad["1:in"], truth)


@pytest.fixture
def safe_bfloat16():
    before = torch.backends.mkldnn.set_flags(_enabled=False)
    yield
    torch.backends.mkldnn.set_flags(*before)


def test_autocast_gives_gradients_in_the_dtype_of_the_output_and_a_scaler_scales_them(safe_bfloat16):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = model[0](X)
        loss = model[2](h.relu()).float().sum()
    (truth,) = torch.autograd.grad(scaler.scale(loss), h)
    with th.record(model, "0", grad=True) as tape:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(X).float().sum()
        scaler.scale(loss).backward()
    assert tape.grad["0"].dtype == torch.bfloat16
    same(tape.grad["0"], truth)


def test_no_gradient_and_no_backward_are_distinguished():
    model = Calls(lambda self, x: (self.used(x), self.unused(x))[0], used=nn.Linear(3, 3), unused=nn.Linear(3, 3))
    with th.record(model, "used", "unused", grad=True) as tape:
        loss = model(X).sum()
        with pytest.raises(th.NoBackward, match="has not run"):
            tape.grad["unused"]
        loss.backward()
        with pytest.raises(th.NoGradient, match="no gradient flowed to 'unused'"):
            tape.grad["unused"]


def test_if_no_point_has_a_gradient_the_error_names_both_reasons():
    model = Calls(lambda self, x: (self.used(x), self.unused(x))[0], used=nn.Linear(3, 3), unused=nn.Linear(3, 3))
    with th.record(model, "unused", grad=True) as tape:
        model(X).sum().backward()
        with pytest.raises(th.NoBackward, match="has not run, or the loss depends on none of the recorded values"):
            tape.grad["unused"]


@pytest.mark.parametrize(("mode", "said"), [(torch.no_grad, "no_grad"), (torch.inference_mode, "inference_mode")])
def test_recording_with_gradients_switched_off_says_so_on_reading(mode, said):
    model = nn.Sequential(nn.Linear(3, 3))
    with mode(), th.record(model, "0", grad=True) as tape:
        model(X)
    with pytest.raises(th.GradientError, match=f"'0'.*{said}"):
        tape.grad["0"]


def test_a_point_without_floats_or_without_need_says_so():
    model = nn.Sequential(Calls(lambda self, x: x.argmax(-1)), nn.Embedding(3, 2))
    with th.record(model, "0", "0:in", grad=True) as tape:
        model(X).sum().backward()
    with pytest.raises(th.GradientError, match="'0': it contains no floating-point tensor"):
        tape.grad["0"]
    with pytest.raises(th.GradientError, match="'0:in': it does not require grad"):
        tape.grad["0:in"]


def test_a_tape_without_gradients_says_how_to_get_them():
    model = nn.Linear(3, 3)
    with th.record(model, ":return") as tape:
        model(X)
    with pytest.raises(th.NoBackward, match="grad=True"):
        tape.grad[":return"]


def test_a_gradient_that_a_later_hook_changes_in_place_is_not_passed_off_as_what_flowed():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with th.record(model, "0", grad=True) as tape:
        y = model[0](X)
        y.register_hook(lambda g: g.mul_(2))
        y.pow(2).sum().backward()
    with pytest.raises(th.ValueChanged, match="'0' was changed in place"):
        tape.grad["0"]


def test_a_recorded_tensor_can_be_saved_without_a_warning():
    model = nn.Linear(3, 3)
    with th.record(model, ":return", grad=True):
        out = model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(out.detach(), io.BytesIO())
        torch.save(out, io.BytesIO())


def test_custom_functions_and_their_outputs_are_watched():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    model = Calls(lambda self, x: self.part(x).pow(2).sum(), part=Calls(lambda self, x: Double.apply(x)))
    x = X.clone().requires_grad_()
    grad = recorded(model, "part", "part:in", of=lambda m: m(x))
    same(grad["part"], 2 * (X * 2))
    same(grad["part:in"], 4 * (X * 2))


def test_the_gradient_of_an_output_that_the_module_uses_itself_is_that_of_the_value():
    model = Mixed(3)
    y = model.part.linear(X)
    scaled = y * 2
    truth = torch.autograd.grad((scaled * y).sum(), (scaled, y))
    grad = recorded(model, "part", of=lambda m: m(X).sum())["part"]
    same(grad["y"], truth[0])
    same(grad["rest"][0], truth[1])
    assert grad["rest"][1] is None


@pytest.mark.parametrize("part", ["own", "view", "handed on"])
def test_a_tuple_of_one_tensor_and_nothing_else_has_a_gradient_of_the_same_structure(part):
    made = {"own": lambda _, x: (x * 2, None), "view": lambda _, x: ((x * 2).view(-1), None, None)}
    model = Calls(lambda self, x: (self.part(x)[0] * 3).sum(), part=Calls(made.get(part, lambda _, x: (x, None))))
    x = X.clone().requires_grad_()
    with th.record(model, "part", grad=True) as tape:
        model(x).backward()
    found = tape.grad["part"]
    assert type(found) is tuple
    assert len(found) == len(tape["part"])
    assert all(rest is None for rest in found[1:])
    same(found[0], torch.full_like(tape["part"][0], 3.0))


def test_a_tensor_that_is_passed_on_again_and_again_gathers_no_hooks():
    model = nn.Sequential(nn.Identity())
    x = torch.ones(2, requires_grad=True) * 2
    with th.record(model, "0", grad=True, keep=3) as tape:
        outs = [model(x) for _ in range(200)]
        assert len(x._backward_hooks) < 30
        sum(out.sum() * place for place, out in enumerate(outs)).backward()
    assert [float(each[0]) for each in tape.grad.calls("0")] == [197.0, 198.0, 199.0]
