"""Rows that are put together, and several tables that are read at once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenterhook.statistics.measure import COLUMNS, RowNumbers, Workspace, hosts, measure
from tenterhook.statistics.merge import MergeOrder, stacked


def truth(tensors):
    """What is told of all elements together, by numpy, in double precision."""
    x = torch.cat([tensor.double().reshape(-1) for tensor in tensors]).numpy()
    if not len(x):
        return [0] * len(COLUMNS)
    return [x.size, x.mean(), x.std(), x.min(), x.max(), np.sqrt((x**2).sum()), (x == 0).sum(), 0, 0]


parts = st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=6).map(torch.tensor), min_size=2, max_size=5)


@settings(deadline=None)
@given(parts)
def test_parts_put_together_are_as_if_measured_at_once(tensors):
    table = measure(tensors).host()
    step_by_step = np.zeros((1, len(COLUMNS)))
    for row in table:
        step_by_step = stacked([step_by_step, row[None]])
    at_once = MergeOrder(np.zeros(len(tensors), int)).combine(table)
    for found in (at_once, step_by_step, stacked([row[None] for row in table])):
        np.testing.assert_allclose(found[0], truth(tensors), rtol=1e-4, atol=2e-3)


def test_of_no_elements_there_is_no_least():
    found = stacked(measure([torch.tensor([3.0, 5.0]), torch.empty(0)]).host()[:, np.newaxis])
    assert dict(zip(COLUMNS, found[0].tolist(), strict=True))["min"] == 3


def test_rows_of_several_places_are_kept_apart():
    tensors = [torch.tensor([1.0]), torch.tensor([5.0]), torch.tensor([3.0])]
    order = MergeOrder(np.array([2, 0, 2]))
    assert order.rows.tolist() == [0, 2]
    assert order.combine(measure(tensors).host())[:, COLUMNS.index("mean")].tolist() == [5.0, 2.0]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("limit", [None, 64])
def test_several_are_read_as_each_of_them_is(quick, limit):
    torch.manual_seed(0)
    workspace, shapes = Workspace(), [(3, 4), (7,), (20, 30), (), (3, 4), (128,), (2, 128)]
    steps = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    steps[1][1].add_(1e4)  # Its spread is lost in its squares.
    measured = [measure(tensors, limit, workspace=workspace, name="x", quick=quick) for tensors in steps]
    each = [found.host() for found in measured]
    drowned = [list(found.drowned) for found in measured]
    together = hosts(measured)
    np.testing.assert_array_equal(together, np.stack(each))
    assert [list(found.drowned) for found in measured] == drowned == [[], [1] if quick else [], []]
    if limit is None and not quick:
        for table, tensors in zip(together, steps, strict=True):
            np.testing.assert_allclose(table, [truth([tensor]) for tensor in tensors], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("numbers", "finite"),
    [([1.0, 2.0], True), ([3e38, 3e38], True), ([-3e38, -3e38], True), ([1.0, np.inf], False),
     ([np.inf, -np.inf], False), ([np.nan, 0.0], False), ([], True)],
)  # fmt: skip
def test_numbers_whose_sum_overflows_are_finite_nevertheless(numbers, finite):
    assert RowNumbers(torch.tensor(numbers, dtype=torch.float32)).finite() is finite
