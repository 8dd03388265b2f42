"""The Triton kernels, run by Triton's interpreter on the CPU; on a GPU, benchmarks/gpu_watch.py compares them too."""

import importlib.util
import os

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.statistics import fused, fused_table
from tenterhook.statistics.graph_measure import fields_of
from tenterhook.statistics.graph_table import CALLS, NOT_A_NUMBER, NUMBER, SAMPLED, columns_of, new_table
from tenterhook.statistics.measure import COLUMNS, MEAN, NORM, Wanted, Workspace, measure, measure_together, whole
from tenterhook.statistics.sketch import Sketch
from tenterhook.statistics.snapshot import Snapshot

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (it comes with PyTorch for CUDA): pip install triton",
)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the kernels are run on the CPU with TRITON_INTERPRET=1, which has to be set before Triton loads")
    monkeypatch.setattr(fused, "devices", frozenset(["cpu"]))
    why = fused.why_not(CPU)
    if why is not None and "only 0-dimensional arrays can be converted" in why:
        pytest.skip(f"the interpreter of this Triton does not go with this NumPy: {why}")
    assert why is None


def tensors(dtype):
    torch.manual_seed(0)
    found = [
        torch.randn(5, 7),
        torch.randn(40000) * 3 + 1000,  # A mean that would drown the spread.
        torch.full((3,), float("nan")),
        torch.tensor(2.0),
        torch.zeros(2000),
        torch.randn(3, 1024 * 33),
        torch.randn(64, 64).t(),
        torch.randn(65)[1:],  # It begins at an odd place.
        torch.randn(1, 8).expand(4, 8),
        torch.randn(65536),  # A piece exactly.
    ]
    found = [tensor.to(dtype) for tensor in found]
    found[0][0, 0], found[5][2, 5], found[5][0, 0] = float("-inf"), float("nan"), float("inf")
    return found


@pytest.mark.parametrize("dtype", sorted(fused.DTYPES, key=str))
def test_all_statistics_are_those_of_every_element(dtype):
    given = tensors(dtype)
    assert fused.why_not(CPU) is None
    found = measure(given, 16)
    assert not any(found.sampled)
    np.testing.assert_allclose(found.host(), np.stack([whole(tensor) for tensor in given]), rtol=1e-5, atol=1e-5)


def test_squares_beyond_float32_are_no_trouble():
    large, small = torch.full((2000,), 1e30), torch.full((2000,), 1e-25)
    large[::2] *= -1
    table = measure([large, small]).host()
    line = [dict(zip(COLUMNS, row, strict=True)) for row in table.tolist()]
    assert line[0]["norm"] == pytest.approx(1e30 * 2000**0.5, rel=1e-5)
    assert line[0]["std"] == pytest.approx(1e30, rel=1e-5)
    assert line[1]["norm"] == pytest.approx(1e-25 * 2000**0.5, rel=1e-5)


def test_tensors_of_several_types_are_measured_in_one_call_and_odd_ones_the_other_way():
    given = [torch.randn(50), torch.randn(50).double(), torch.randn(50).bfloat16(), torch.zeros(0), torch.randn(50)]
    found = measure(given).host()
    expected = np.stack([whole(tensor) if tensor.numel() else found[3] for tensor in given])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert found[3, 0] == 0


def test_addresses_are_followed_when_tensors_move():
    workspace = Workspace()
    for _ in range(3):
        given = [torch.randn(100), torch.randn(7)]
        found = measure(given, workspace=workspace, name="x").host()
        np.testing.assert_allclose(found, np.stack([whole(t) for t in given]), rtol=1e-5, atol=1e-6)


@pytest.fixture
def launches(monkeypatch):
    """The kernels that are launched."""
    found = []
    launch = fused._Kernel.__call__
    monkeypatch.setattr(
        fused._Kernel, "__call__", lambda kernel, *args: (found.append(kernel._kernel), launch(kernel, *args))[1]
    )
    return found


def test_several_lists_are_measured_in_the_launches_of_one(launches):
    lists = [[torch.randn(100), torch.randn(7)], [torch.randn(3, 3), torch.full((4,), float("nan"))], [torch.ones(2)]]
    workspace = Workspace()
    for _ in range(2):
        lists = [[tensor.clone() for tensor in each] for each in lists]
        launches.clear()
        found = measure_together([Wanted(each) for each in lists], None, workspace)
        assert len(launches) == 2, "one for the pieces, and one that puts them together"
        for each, measured in zip(lists, found, strict=True):
            true = np.stack([whole(tensor) for tensor in each])
            np.testing.assert_allclose(measured.host(), true, rtol=1e-5, atol=1e-6)
        assert [measured.finite() for measured in found] == [True, False, True]


@pytest.mark.parametrize("odd", [torch.randn(5).double(), torch.zeros(0)], ids=["another type", "empty"])
def test_lists_with_what_the_kernels_do_not_read_are_measured_one_after_the_other(odd):
    lists = [[torch.randn(100), torch.randn(7)], [torch.randn(3, 3), odd]]
    found = measure_together([Wanted(each) for each in lists], None, Workspace())
    for each, measured in zip(lists, found, strict=True):
        true = np.stack([whole(tensor) if tensor.numel() else np.zeros(len(COLUMNS)) for tensor in each])
        np.testing.assert_allclose(measured.host(), true, rtol=1e-5, atol=1e-6)


def test_samples_of_several_lists_are_counted_under_their_own_rows():
    lists, sketch = [[torch.full((40,), 2.0)], [torch.full((5,), -3.0), torch.zeros(3)]], Sketch()
    measure_together([Wanted(lists[0], rows=[2]), Wanted(lists[1], rows=[0, 1])], sketch, Workspace())
    assert sketch.host(3).sum(1).tolist() == [5, 3, 32]


def test_the_sketch_takes_the_places_that_it_says():
    given = [torch.arange(1.0, 33.0), torch.full((500,), -3.0), torch.tensor([4.0]), torch.zeros(5)]
    ours, theirs = Sketch(), Sketch()
    measure(given, sketch=ours, rows=[2, 0, 1, 3])
    fused.wanted = False
    try:
        measure(given, sketch=theirs, rows=[2, 0, 1, 3])
    finally:
        fused.wanted = True
    theirs.pour()
    np.testing.assert_array_equal(ours.host(4), theirs.host(4))
    assert ours.host(4).sum(1).tolist() == [32, 1, 32, 5]


@pytest.mark.parametrize("limit", [None, 64, 5])
def test_how_far_tensors_have_moved(limit):
    torch.manual_seed(0)
    given = [torch.randn(10, 20), torch.randn(30), torch.randn(500).bfloat16()]
    before = [tensor.clone() for tensor in given]
    snapshot = Snapshot(given, limit, Workspace())
    snapshot.take()
    for tensor in given:
        tensor.add_(0.5)
    here, moved = snapshot.moved(None, range(3), range(3))
    way = moved.host()
    for i, (tensor, old) in enumerate(zip(given, before, strict=True)):
        true = (tensor.float() - old.float()).norm()
        assert way[i, 5] == pytest.approx(float(true), rel=0.1 if here.sampled[i] else 1e-4)
    if limit is None:
        np.testing.assert_allclose(here.host(), np.stack([whole(t) for t in given]), rtol=1e-5, atol=1e-5)
    assert here.sampled.tolist() == ([False] * 3 if limit is None else [True, limit == 5, True])


@pytest.mark.parametrize("later", [False, True], ids=["at once", "together, before the update"])
def test_a_watch_shows_the_same_as_one_that_reads_every_element_the_other_way(later, monkeypatch):
    joint, join = [], Workspace.joint
    monkeypatch.setattr(Workspace, "joint", lambda *args: (joint.append(1), join(*args))[1])

    def run(sample):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 300))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with th.watch(model, optimizer=optimizer, sample=sample, on_nan="record", slow=3) as w:
            w._late = later  # As it is on a GPU.
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(50, 16)).square().mean().backward()
                optimizer.step()
        return w

    ours = run(2**13)
    assert bool(joint) == later
    fused.wanted = False
    try:
        theirs = run(None)
    finally:
        fused.wanted = True
    assert len(ours.rows()) == len(theirs.rows())
    for mine, other in zip(ours.rows(), theirs.rows(), strict=True):
        assert (mine["kind"], mine["address"], mine["count"]) == (other["kind"], other["address"], other["count"])
        if mine["exact"]:
            for name in COLUMNS[MEAN:]:
                assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (mine["address"], name)
    assert {row["address"] for row in ours.rows() if not row["exact"]} == {"3.weight"}


def test_nan_is_counted_and_named_as_ever():
    model = nn.Sequential(nn.Linear(4, 3000), nn.ReLU())
    with th.watch(model, on_nan="record") as w:
        x = torch.ones(5, 4)
        x[1] = float("nan")
        model(x).sum().backward()
    assert w.row("0")["nan"] == 3000
    assert "input of the model already contained it" in str(w.nonfinite)


def table_of(given, rows, *, calls=1, limit=8):
    """Return the rows of a table to which some tensors were added."""
    table = new_table(max(rows) + 1, CPU)
    for _ in range(calls):
        torch.ops.tenterhook.measure_into(table, given, rows, limit, None, False)
    return table.numpy()


@pytest.mark.parametrize("dtype", sorted(fused.DTYPES, key=str))
def test_tensors_are_added_to_the_rows_of_a_table(dtype):
    given = tensors(dtype)
    rows = list(range(len(given)))[::-1]
    expected = np.stack([whole(tensor) for tensor in given])[::-1]
    for calls in (1, 2):
        fields = table_of(given, rows, calls=calls)
        assert (fields[:, SAMPLED] == 0).all()
        assert (fields[:, CALLS] == calls).all()
        found = columns_of(fields)
        some = fields[:, NUMBER] > fields[:, NOT_A_NUMBER]
        assert not some[rows[2]]  # Only NaN.
        sums = [COLUMNS.index(name) for name in ("count", "zeros", "nan", "inf")]
        others = [COLUMNS.index(name) for name in ("mean", "std", "min", "max")]
        np.testing.assert_allclose(found[:, sums], calls * expected[:, sums])
        np.testing.assert_allclose(found[some][:, others], expected[some][:, others], rtol=1e-5, atol=1e-5)
        norms = found[:, NORM] / calls**0.5
        np.testing.assert_allclose(norms, expected[:, NORM], rtol=1e-5, atol=1e-5)


def test_tensors_of_one_row_and_rows_of_one_tensor_are_added_in_one_call():
    one, two = torch.randn(70000), torch.randn(30)
    many = [one, two, one.view(700, 100), two.double(), *[torch.randn(3) for _ in range(80)]]
    rows = [0, 1, 2, 0, *range(3, 83)]
    found = columns_of(table_of(many, rows, limit=0))
    np.testing.assert_allclose(found[0], whole(torch.cat([one, two])), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], whole(two), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[2], whole(one), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[3:], np.stack([whole(each) for each in many[4:]]), rtol=1e-5, atol=1e-6)


def test_the_kernels_and_single_operations_fill_the_same_fields():
    given = [tensor for tensor in tensors(torch.float32) if torch.isfinite(tensor).any()]
    rows = list(range(len(given)))
    fused_fields = table_of(given, rows)
    for row, each in enumerate(given):
        np.testing.assert_allclose(fields_of(each).numpy(), fused_fields[row], rtol=1e-4, atol=1e-4)


def test_a_call_like_the_last_one_measures_its_own_tensors():
    one, two, three = (torch.randn(64, 40) for _ in range(3))
    odd = torch.randn(64 * 40 + 1)[1:].view(64, 40)
    calls = [
        (one, two, one), (one, two, one), (three, one, three),  # The same tensor twice.
        (one, two, three), (one, two, one.view(64, 40)),  # No more; or the same memory in another tensor.
        (odd, two, odd), (one.t().contiguous().t(), two, three), (one[:, :8].clone(), two, three), (one, two, one),
    ]  # fmt: skip
    rows = [5, 1, 3]
    for number, call in enumerate(calls):
        call[0].mul_(1.5)
        found = columns_of(table_of(call, rows, limit=0))[rows]
        expected = np.stack([whole(each) for each in call])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=str(number))


def test_only_an_unusual_call_is_prepared_again(monkeypatch):
    monkeypatch.setattr(fused_table, "_calls", {})
    prepared = []
    add_new = fused_table._add_new
    monkeypatch.setattr(fused_table, "_add_new", lambda *args, **kwargs: prepared.append(1) or add_new(*args, **kwargs))
    for _ in range(3):
        one = torch.randn(30)
        table_of([one, torch.randn(8, 8), one], [0, 1, 2])
    assert len(prepared) == 1
    table_of([torch.randn(30), torch.randn(8, 8), torch.randn(30)], [0, 1, 2])
    assert len(prepared) == 2
