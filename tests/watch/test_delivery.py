"""Numbers that arrive later, as they do from a GPU: the same books, the same findings, and no waiting."""

import math

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.watch.delivery import AT_ONCE
from tenterhook.watch.measured_batch import MeasuredBatch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.log(self.a(x).abs() - (1e9 if x[0, 0] > 5 else -1)))


def run(monkeypatch, *, arrives, bad=None, late=True):
    monkeypatch.setattr(MeasuredBatch, "arrived", property(lambda _: arrives))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    published = []
    watch = th.watch(model, optimizer=optimizer, on_nan="record")
    watch._late = late
    with watch as w:
        for step in range(6):
            optimizer.zero_grad()
            model(torch.full((2, 4), 9.0 if step == bad else 1.0)).sum().backward()
            optimizer.step()
            published.append(len(w.pages))
    return w, published


def plain(rows):
    return {
        (row["kind"], row["address"]): {k: v for k, v in row.items() if not isinstance(v, (dict, str))} for row in rows
    }


@pytest.mark.parametrize("arrives", [True, False])
def test_the_numbers_are_the_same(monkeypatch, arrives):
    at_once, published = run(monkeypatch, arrives=True, late=False)
    assert published == [1, 2, 3, 4, 5, 6]
    late, published = run(monkeypatch, arrives=arrives)
    assert published == ([1, 2, 3, 4, 5, 6] if arrives else [0, 0, 1, 2, 3, 4])
    assert late.steps == 6
    assert [page.step for page in late.pages] == list(range(6))
    expected = plain(at_once.rows())
    for key, numbers in plain(late.rows()).items():
        assert numbers == pytest.approx(expected[key], rel=1e-6), key


def test_a_nan_that_is_found_late_is_explained_without_its_line(monkeypatch):
    late, _ = run(monkeypatch, arrives=True, bad=2)
    found = late.nonfinite
    assert (found.step, found.address, found.produced_by) == (2, "b", ":return")
    assert found.line is None
    assert 'on_nan="raise" finds it' in found.note
    assert found.inputs["0"]["nan"] == 0


def test_a_nan_whose_tensors_are_gone_is_still_named(monkeypatch):
    late, _ = run(monkeypatch, arrives=False, bad=2)
    found = late.nonfinite
    assert (found.step, found.address, found.kind) == (2, "b", "values")
    assert found.inputs == {}
    assert late.nonfinite_steps[0] == 2
    row = late.row("a")  # What was finite keeps its numbers.
    assert row["nan"] == 16
    assert math.isfinite(row["mean"])


# -- several steps at a time ------------------------------------------------------------------------------------------


def steps(w, model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0)).sum().backward()
        optimizer.step()


def test_steps_are_published_together_but_whoever_looks_sees_them_all():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with th.watch(model, optimizer=optimizer) as w:
        steps(w, model, optimizer, AT_ONCE)
        assert len(w._history.pages) == AT_ONCE  # From here on they wait for each other.
        steps(w, model, optimizer, 3)
        assert len(w._history.pages) == AT_ONCE
        assert [page.step for page in w.pages] == list(range(AT_ONCE + 3))
        steps(w, model, optimizer, 2)
        assert w.row("a")["steps"] == AT_ONCE + 5
    assert [page.step for page in w.pages] == list(range(AT_ONCE + 5))


def test_a_sink_is_reported_each_step_as_it_ends():
    class Sink:
        seen = 0

        def write(self, page, findings, books):
            self.seen += 1

        def close(self):
            pass

    model, sink, told = Net(), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with th.watch(model, optimizer=optimizer, sinks=[sink]) as w:
        for _ in range(AT_ONCE + 3):
            steps(w, model, optimizer, 1)
            told.append(sink.seen)
    assert told == list(range(1, AT_ONCE + 4))


def test_what_explodes_while_steps_wait_is_found_with_its_step():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with th.watch(model, optimizer=optimizer) as w:
        steps(w, model, optimizer, AT_ONCE + 2)
        (model(torch.full((2, 4), 1.0)).sum() * 1e6).backward()
        optimizer.step()
        (found,) = w.findings
        assert (found.kind, found.address, found.first) == ("exploding gradient", "parameters", AT_ONCE + 2)


def test_a_nan_is_raised_before_the_update_also_where_steps_wait():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(th.NonFinite), th.watch(model, optimizer=optimizer, on_nan="raise") as w:
        steps(w, model, optimizer, AT_ONCE + 3)
        model(torch.full((2, 4), 9.0)).sum().backward()
    assert w.nonfinite.step == AT_ONCE + 3
    assert [page.step for page in w.pages] == list(range(AT_ONCE + 4))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("late", [False, True])
def test_gradients_of_parameters_are_the_sum_of_several_passes(late):
    model, twin = Net(), Net()
    watch = th.watch(model, steps="manual", sample=None)
    watch._late = late
    x = torch.full((2, 4), 1.0)
    with watch as w:
        for _ in range(2):
            model(x).sum().backward()
            twin(x).sum().backward()
        w.step()
    row = w.row("a.weight", "gradients")
    assert row["count"] == 16
    assert row["norm"] == pytest.approx(float(twin.a.weight.grad.norm()), rel=1e-5)


def test_steps_of_changing_shapes_have_each_their_own_numbers():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with th.watch(model, optimizer=optimizer, sample=None) as w:
        for size in (2, 2, 3, 3, 2, 3, 2, 2):
            x = torch.full((size, 4), 1.0)
            model(x).sum().backward()
            optimizer.step()
            true = nn.functional.linear(x, model.a.weight, model.a.bias)
            page = w.pages[-1]
            assert page.column("count", "values")["a"] == 4 * size
            assert page.column("norm", "values")["a"] == pytest.approx(float(true.detach().norm()), rel=1e-5)
