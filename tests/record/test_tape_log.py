"""The order in which values were produced is on every tape, and is that of raw hooks."""

import json
import random

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.record import tape_file as store
from tenterhook.record.tensor_file import read, write
from tenterhook.report.compare import compare

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Mixed(nn.Module):
    """Registers its children in one order and calls them in another; some several times, some within others."""

    def __init__(self, draw, depth):
        super().__init__()
        names = [f"m{number}" for number in range(draw.randint(1, 4))]
        for name in names:
            self.add_module(name, Mixed(draw, depth - 1) if depth and draw.random() < 0.5 else nn.Linear(3, 3))
        self.plan = [draw.choice(names) for _ in range(draw.randint(1, 5))]

    def forward(self, x):
        for name in self.plan:
            x = torch.tanh(getattr(self, name)(x))
        return x


def mixed(seed):
    torch.manual_seed(seed)
    return Mixed(random.Random(seed), 2)


def raw_order(model, x, *, inputs=False):
    """Addresses with their calls, as raw hooks see them: the truth."""
    seen, counts, handles = [], {}, []

    def before(name):
        def hook(*_):
            counts[name] = counts.get(name, -1) + 1
            if inputs:
                seen.append(f"{name}:in#{counts[name]}")

        return hook

    for path, module in model.named_modules():
        name = path or ":return"
        handles.append(module.register_forward_pre_hook(before(path)))
        handles.append(module.register_forward_hook(lambda *_, n=name, p=path: seen.append(f"{n}#{counts[p]}")))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def with_calls(tape):
    return [address if "#" in address else f"{address}#0" for address in tape.in_order()]


@pytest.mark.parametrize("seed", range(50))
def test_outputs_are_in_the_order_in_which_calls_returned(seed, tmp_path):
    model = mixed(seed)
    wanted = raw_order(model, X)
    selectors = [path or ":return" for path, _ in model.named_modules()]
    random.Random(seed).shuffle(selectors)
    called = {address.rpartition("#")[0] for address in wanted}
    with torch.no_grad(), th.record(model, *[each for each in selectors if each in called]) as tape:
        model(X)
    assert with_calls(tape) == wanted
    tape.save(tmp_path / "run.th")
    assert with_calls(th.load(tmp_path / "run.th")) == wanted


@pytest.mark.parametrize("seed", range(20))
def test_inputs_are_in_the_order_in_which_calls_began(seed):
    model = mixed(seed)
    wanted = raw_order(model, X, inputs=True)
    with torch.no_grad(), th.record(model, "**", "**:in") as tape:
        model(X)
    assert with_calls(tape) == wanted


@pytest.mark.parametrize("seed", range(10))
def test_gradients_do_not_change_the_order(seed):
    model = mixed(seed)
    wanted = raw_order(model, X)
    with th.record(model, "**", grad=True) as tape:
        model(X).sum().backward()
    assert with_calls(tape) == wanted


@pytest.mark.parametrize("seed", range(6))
def test_a_compiled_graph_gives_the_same_order(seed):
    model = mixed(seed)
    wanted = raw_order(model, X)
    fast = torch.compile(model, backend="eager")
    with torch.no_grad(), th.record(fast, "**") as tape:
        fast(X)
    assert with_calls(tape) == wanted


@pytest.mark.parametrize("seed", range(20))
def test_a_comparison_names_the_first_module_that_ran_with_another_weight(seed):
    model, draw = mixed(seed), random.Random(seed)
    order = raw_order(model, X)
    leaves = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    called = [address for address in order if address.partition("#")[0] in leaves]
    changed = draw.choice(called).partition("#")[0]
    tapes = []
    for _ in range(2):
        with torch.no_grad(), th.record(model, "**") as tape:
            model(X)
        tapes.append(tape)
        with torch.no_grad():
            model.get_submodule(changed).bias.add_(1)
    first = next(each for each in compare(*tapes) if each.differs)
    address = first.address if "#" in first.address else f"{first.address}#0"
    assert address == next(each for each in called if each.partition("#")[0] == changed)


def test_keep_last_holds_the_last_calls_in_their_order():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with torch.no_grad(), th.record(model, "1", "0", keep="last") as tape:
        for _ in range(3):
            model(X)
    assert tape.in_order() == ["0#2", "1#2"]
    assert len(tape) == 2


def test_values_are_in_order_after_a_tape_was_cleared():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with torch.no_grad(), th.record(model, "1", "0") as tape:
        model(X)
        tape.clear()
        assert tape.in_order() == []
        model(X)
    assert tape.in_order() == ["0#1", "1#1"]


def test_a_file_without_an_order_is_still_read(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with th.record(model, "1", "0") as tape:
        model(X)
    tape.save(tmp_path / "new.th")
    texts, tensors = read(store.TAPE, tmp_path / "new.th")
    described = json.loads(texts["tape"])
    for track in described["values"]:
        del track["order"]
    write(store.TAPE, tmp_path / "old.th", tensors, {"tape": json.dumps(described)})
    old = th.load(tmp_path / "old.th")
    assert not old.is_ordered
    assert old.in_order() == ["1", "0"]
    assert torch.equal(old["0"], tape["0"])
    old.save(tmp_path / "again.th")
    assert not th.load(tmp_path / "again.th").is_ordered


def test_a_file_with_a_broken_order_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3))
    with th.record(model, "0") as tape:
        model(X)
    tape.save(tmp_path / "run.th")
    texts, tensors = read(store.TAPE, tmp_path / "run.th")
    described = json.loads(texts["tape"])
    described["values"][0]["order"] = [0, 1, 2]
    write(store.TAPE, tmp_path / "bad.th", tensors, {"tape": json.dumps(described)})
    with pytest.raises(th.TapeFileError, match="order"):
        th.load(tmp_path / "bad.th")
