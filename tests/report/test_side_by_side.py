"""The comparison of two tapes on their page, against what plain hooks of PyTorch see."""

import random

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.report.compare import compare, first_difference
from tenterhook.report.page import tapes_page

CASES = 60


class Shuffled(nn.Module):
    """Modules that are called in another order than they were built in, some of them several times."""

    def __init__(self, draw, width=4):
        super().__init__()
        kinds = (lambda: nn.Linear(width, width), nn.Tanh, nn.Sigmoid, lambda: nn.Sequential(nn.Linear(width, width)))
        self.parts = nn.ModuleList(draw.choice(kinds)() for _ in range(draw.randint(2, 6)))
        self.order = [draw.randrange(len(self.parts)) for _ in range(draw.randint(2, 9))]

    def forward(self, x):
        for place in self.order:
            x = self.parts[place](x)
        return x


def changed(model, draw):
    """Draw a change of one call's output or of its gradient; give what to register as a hook of PyTorch."""
    name = f"parts.{draw.choice(model.order)}"
    call = draw.randrange(sum(f"parts.{place}" == name for place in model.order))
    return name, call, draw.random() < 0.5


def run(model, x, change=None):
    """Run a model under plain hooks, with a change at one call; give outputs and gradients, each in order."""
    values, gradients, counts, handles = [], [], {}, []
    names = {
        module: name or ":return" for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)
    }

    def seen(module, _args, output):
        name = names[module]
        call = counts[name] = counts.get(name, -1) + 1
        here = change is not None and change[:2] == (name, call)
        if here and not change[2]:
            output = output * 1.5 + 0.1
        output = output * 1.0  # A node of its own, so that a gradient is this call's alone.
        if here and change[2]:
            output.register_hook(lambda gradient: gradient * 1.5 + 0.1)
        values.append((name, call, output.detach().clone()))
        output.register_hook(lambda gradient: gradients.append((name, call, gradient.clone())))
        return output

    handles = [module.register_forward_hook(seen) for module in names]
    with th.record(model, "**", grad=True) as tape:
        model(x).square().sum().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return tape, values, gradients


def truth(first, second):
    """The first call whose outputs differ, or else whose gradients do."""
    for gradient, (mine, other) in enumerate(zip(first[1:], second[1:], strict=True)):
        others = {each[:2]: each[2] for each in other}
        for name, call, tensor in mine:
            if not torch.allclose(tensor, others[name, call], rtol=1.3e-6, atol=1e-5):
                return {"address": name, "call": call, "gradient": bool(gradient)}
    return None


@pytest.mark.parametrize("seed", range(CASES))
def test_the_first_difference_is_the_one_that_plain_hooks_find(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, x = Shuffled(draw), torch.randn(3, 4, requires_grad=True)
    change = changed(model, draw) if seed % 10 else None
    first, second = run(model, x), run(model, x, change)
    page = tapes_page({"a": first[0], "b": second[0]})
    expected = truth(first, second)
    assert page.first == expected
    assert (expected is None) == (seed % 10 == 0)
    told = first_difference(compare(first[0], second[0]))
    assert (told is None) == (expected is None)
    if expected is not None:
        name = expected["address"]
        assert told.address in (name, f"{name}#{expected['call']}")
        assert told.gradient is expected["gradient"]
        assert page.remarks[0]["address"] == told.address
    for row in page.points:
        for call in row["runs"][0]:
            for key, seen in (("value", 1), ("gradient", 2)):
                a, b = (
                    next(each[2] for each in of[seen] if each[:2] == (row["address"], call["call"]))
                    for of in (first, second)
                )
                alike = torch.allclose(a, b, rtol=1.3e-6, atol=1e-5)
                assert call["compared"][key]["differs"] is not alike
                relative = float((a - b).norm() / a.norm())
                assert call["compared"][key]["apart"] == pytest.approx(relative, rel=1e-3, abs=1e-9)


def tape_of(value, grad=None):
    model = nn.Sequential(nn.Identity())
    with th.record(model, "0", grad=grad is not None) as tape:
        output = model(value)
        if grad is not None:
            output.backward(grad)
    return tape


@pytest.mark.parametrize(
    ("left", "right", "differs"),
    [
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), True),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 1j]), False),
        (torch.tensor([2**24 + 1], dtype=torch.int32), torch.tensor([2**24], dtype=torch.int32), True),
        (torch.tensor([2**60 + 1]), torch.tensor([2**60]), True),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), True),
        ((torch.ones(1), 3), (torch.ones(1), 4), True),
        ((torch.ones(1), "x" * 100), (torch.ones(1), "x" * 99 + "y"), True),
        ((torch.ones(1), float("nan")), (torch.ones(1), float("nan")), False),
        (torch.ones(2, dtype=torch.bool), torch.tensor([True, False]), True),
        (torch.ones(2).to_sparse(), torch.tensor([1.0, 2.0]).to_sparse(), True),
    ],
)
def test_values_of_every_kind_are_compared(left, right, differs):
    page = tapes_page({"a": tape_of(left), "b": tape_of(right)})
    assert (page.first is not None) is differs
    assert page.points[0]["runs"][0][0]["compared"]["value"]["differs"] is differs


def test_nested_tensors_are_compared():
    make = [torch.ones(2, 3), torch.ones(1, 3)]
    same, other = (torch.nested.nested_tensor(each, layout=torch.jagged) for each in (make, [make[0], make[1] * 2]))
    assert tapes_page({"a": tape_of(same), "b": tape_of(same)}).first is None
    assert tapes_page({"a": tape_of(same), "b": tape_of(other)}).first is not None


def test_what_has_no_values_is_not_called_equal():
    meta = tape_of(torch.empty(2, device="meta"))
    page = tapes_page({"a": meta, "b": meta})
    assert page.points[0]["runs"][0][0]["compared"]["value"]["text"] == "not compared: no values"
    assert page.remarks[0]["text"] == "compared: 0 of 0 values differ, 1 value could not be compared"


def test_a_gradient_that_one_tape_lacks_is_named():
    x = torch.ones(2, requires_grad=True)
    page = tapes_page({"before": tape_of(x * 1, torch.ones(2)), "after": tape_of(x * 1)})
    assert page.points[0]["runs"][0][0]["compared"]["gradient"]["text"] == "only in before"
    assert page.first is None


def test_tapes_of_gradients_alone_are_compared():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2)
    tapes = []
    for factor in (1, 2):
        with th.record(model, "**", grad=True, values=False) as tape:
            (factor * model(x)).sum().backward()
        tapes.append(tape)
    found = compare(*tapes)
    assert [(each.address, each.gradient, each.differs) for each in found] == [
        (":return", True, True), ("1", True, True), ("0", True, True),
    ]  # fmt: skip


def test_calls_are_paired_by_their_number_whichever_tape_has_more():
    class Loop(nn.Module):
        def __init__(self, times):
            super().__init__()
            self.fc, self.times = nn.Linear(2, 2), times

        def forward(self, x):
            for _ in range(self.times):
                x = self.fc(x)
            return x

    once, thrice = Loop(1), Loop(3)
    thrice.load_state_dict(once.state_dict())
    tapes = []
    for model in (once, thrice):
        with th.record(model, "fc") as tape:
            model(torch.ones(1, 2))
        tapes.append(tape)
    for pair in (tapes, tapes[::-1]):
        found = {each.address: (each.differs, each.compared) for each in compare(*pair)}
        assert found == {"fc#0": (False, True), "fc#1": (True, False), "fc#2": (True, False)}
