"""What recording must leave alone to the last bit: the order of autograd's sums, and the layout of what it sums."""

import itertools

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.record.gradient_slot import copy_if_layout_sensitive


class Handed(nn.Module):
    """One value with three uses, of which one is by way of a module that hands it on."""

    def __init__(self):
        super().__init__()
        self.stem, self.same, self.a, self.b = nn.Linear(16, 16), nn.Identity(), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = self.stem(x)
        later = self.same(h)
        return self.a(h) * self.b(h) + later * 3


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.rand(16, 1, 1))

    def forward(self, x):
        return x * self.by


class Laid(nn.Module):
    """A value whose gradient has an outer dimension of size one that lies inside; the stem is told its strides."""

    def __init__(self):
        super().__init__()
        self.stem, self.scale, self.head = nn.Conv2d(3, 16, 3), Scale(), nn.Linear(16, 4)
        self.strides = []

    def forward(self, x):
        h = self.stem(x)
        h.register_hook(lambda gradient: self.strides.append(gradient.stride()))
        h = (h + self.scale(h.sin())) * 2
        return self.head(h.permute(2, 3, 0, 1).contiguous())


class Changed(nn.Module):
    """What a module hands on is added to in place, and lies otherwise than the gradient that will come to it."""

    def __init__(self, change):
        super().__init__()
        self.stem, self.deep, self.same = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, padding=1), nn.Identity()
        self.head, self.change = nn.Linear(8, 8), change
        self.strides = []

    def forward(self, x):
        h = self.stem(x)
        deep = self.deep(h)
        for value in (h, deep):
            value.register_hook(lambda gradient: self.strides.append(gradient.stride()))
        changed = self.change(self.same(deep), h)
        return self.head((deep if changed is None else changed).permute(0, 2, 3, 1))


def added(deep, h):
    deep += h
    return deep


def added_twice(deep, h):
    deep += h.sin()
    deep += h
    return deep * 2


def cut_off(deep, h):
    return torch.relu_(deep) + h


def gradients(model, x):
    model.zero_grad()
    model(x).pow(2).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def differing(model, x, *points):
    plain = gradients(model, x)
    with th.record(model, *points, grad=True):
        recorded = gradients(model, x)
    return [name for name, gradient in plain.items() if not gradient.equal(recorded[name])]


@pytest.mark.parametrize("points", [["same"], ["same:in"], ["**", "**:in"]])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradients_of_a_value_that_is_passed_on_are_summed_in_the_same_order(points, seed):
    torch.manual_seed(seed)
    assert differing(Handed(), torch.randn(4, 16), *points) == []


class Used(nn.Module):
    """A value that is handed on, with several uses of what is handed on, and others of its own."""

    def __init__(self, combine):
        super().__init__()
        self.stem, self.same, self.too = nn.Linear(16, 16), nn.Identity(), nn.Identity()
        self.a, self.b, self.c, self.combine = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), combine

    def forward(self, x):
        h = self.stem(x)
        return self.combine(self, h, self.same(h))


USES = {
    "a residual after it": lambda m, h, later: m.a(later) * m.b(later) * m.c(later) + h * 3,
    "a residual before it": lambda m, h, later: h * 3 + m.a(later) * m.b(later) * m.c(later),
    "between them": lambda m, h, later: m.a(later) + m.c(h) * m.b(later),
    "on both sides": lambda m, h, later: (m.a(h) + m.c(later)) * m.b(later) + h.sin(),
    "two that hand on": lambda m, h, later: (m.a(m.too(h)) + m.c(later)) * m.b(later) + h.sin(),
    "handed on twice": lambda m, h, later: (m.a(m.too(later)) + m.c(later)) * m.b(later) + h.sin() + h,
}


@pytest.mark.parametrize("points", [["**"], ["**", "**:in"]], ids=["outputs", "inputs too"])
@pytest.mark.parametrize("uses", USES)
def test_several_uses_of_what_is_passed_on_are_summed_in_the_order_of_the_plain_run(uses, points):
    for seed in range(5):
        torch.manual_seed(seed)
        assert differing(Used(USES[uses]), torch.randn(4, 16), *points) == []


def test_a_model_with_as_many_operations_that_needs_nothing_does_not_speak_for_another():
    def chain(m, _h, later):
        return m.c(m.b(m.a(later))) * 2 * 3 * 4 + 1

    for seed in range(5):
        torch.manual_seed(seed)
        assert differing(Used(chain), torch.randn(4, 16), "**") == []
        assert differing(Used(USES["a residual after it"]), torch.randn(4, 16), "**") == []


def test_what_is_recorded_of_such_a_sum_is_what_flows_on():
    torch.manual_seed(0)
    model, flowed = Used(USES["a residual after it"]), []
    combine = model.combine
    model.combine = lambda m, h, later: flowed.append(h.grad_fn) or combine(m, h, later)
    with th.record(model, "**", grad=True) as tape:
        loss = model(torch.randn(4, 16)).pow(2).sum()
        handle = flowed.pop().register_prehook(lambda given: flowed.append(given[0]))
        loss.backward()
    handle.remove()
    assert flowed[0].equal(tape.grad["stem"])


def test_a_module_that_returns_what_another_module_returned_is_seen_as_one():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Identity(), nn.Linear(3, 1))
    with th.record(model, "**", "**:in", grad=True) as tape:
        model(torch.randn(2, 3)).sum().backward()
    assert tape.grad["1"].equal(tape.grad["2"])
    assert tape.grad["0"].equal(tape.grad["2:in"])


def test_a_kept_gradient_does_not_change_the_layout_of_the_sums_that_autograd_makes_of_it():
    torch.manual_seed(0)
    model = Laid()
    assert differing(model, torch.randn(1, 3, 9, 9), "scale") == []
    plain, recorded = model.strides
    assert plain == recorded
    assert plain[0] == 16, "the gradient is not laid out as this test needs it"


@pytest.mark.parametrize("change", [added, added_twice, cut_off])
@pytest.mark.parametrize("points", [["**"], ["same", "head"], ["**", "**:in"]], ids=["all", "two", "inputs too"])
def test_what_flows_back_through_a_change_in_place_of_what_is_passed_on_lies_as_without_recording(change, points):
    torch.manual_seed(0)
    model = Changed(change)
    for _ in range(2):  # A pass that was looked at needs looking at again.
        model.strides.clear()
        assert differing(model, torch.randn(2, 3, 17, 17), *points) == []
        assert model.strides[:2] == model.strides[2:]
    assert change is cut_off or model.strides[0] == (512, 1, 64, 8), "it is not laid out as this test needs it"


def test_a_change_in_place_that_turns_the_sign_of_zeros_turns_it_when_recorded():
    model = Changed(lambda deep, h: deep.mul_(-1) * 0)
    with th.record(model, "**", grad=True) as tape:
        gradients(model, torch.randn(2, 3, 17, 17))
    assert tape.grad["deep"].count_nonzero() == 0
    flowed = []
    with model.deep.register_forward_hook(lambda _m, _a, out: out.register_hook(flowed.append) and None):
        gradients(model, torch.randn(2, 3, 17, 17))
    assert tape.grad["deep"].signbit().equal(flowed[0].signbit())
    assert flowed[0].signbit().any()


VIEWS = {"part": lambda x: x[:, :4], "flat": lambda x: x.flatten(2), "turned": lambda x: x.transpose(2, 3)}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_that_the_model_makes_itself_is_changed_as_without_recording(kind):
    torch.manual_seed(0)
    view = VIEWS[kind]

    def change(deep, h):
        own = view(deep)
        own += view(h)  # Of what is handed on, and with it of what was given, which is used after this.

    model = Changed(change)
    assert differing(model, torch.randn(2, 3, 17, 17), "**") == []
    assert model.strides[:2] == model.strides[2:]


def layouts(shape):
    """Every order of the dimensions in memory, those of size one with several strides, and one value for all."""
    for order in itertools.permutations(range(len(shape))):
        tensor = torch.empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
        yield tensor
        for odd in (1, 2, 3 * tensor.numel()):
            stride = [odd if size == 1 else step for size, step in zip(shape, tensor.stride(), strict=True)]
            yield torch.empty(tensor.numel()).as_strided(shape, stride)
    yield torch.empty(1).expand(shape)


def test_a_sum_has_the_layout_of_its_first_term_wherever_that_is_kept_by_reference():
    compared = 0
    for shape in itertools.product((1, 2, 3), repeat=3):
        every = list(layouts(shape))
        for first, second in itertools.product(every[:-1], every):
            if copy_if_layout_sensitive(first) is first:
                assert (first + second).stride() == first.stride(), (shape, first.stride(), second.stride())
                compared += 1
    assert compared > 1000
