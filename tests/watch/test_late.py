"""Numbers that arrive later, as they do from a GPU: the same books, the same findings, and no waiting."""

import math

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.watch.parcel import Parcel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.log(self.a(x).abs() - (1e9 if x[0, 0] > 5 else -1)))


def run(monkeypatch, *, arrives, bad=None, late=True):
    monkeypatch.setattr(Parcel, "arrived", property(lambda _: arrives))
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
    assert (found.step, found.address, found.born) == (2, "b", ":return")
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
