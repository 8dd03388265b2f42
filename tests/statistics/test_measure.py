import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tenterhook.statistics import sketch as sketch_module
from tenterhook.statistics import stacked_reductions
from tenterhook.statistics.measure import COLUMNS, Measured, MeasurePlan, RowNumbers, Workspace, measure, whole
from tenterhook.statistics.sampling import spacing
from tenterhook.statistics.sketch import BinPlaces, Sketch, edges, histogram, quantiles
from tenterhook.statistics.snapshot import Snapshot
from tenterhook.statistics.tensor_signature import plain


def truth(tensor):
    """The same by numpy, in double precision."""
    x = tensor.detach().double().numpy().ravel()
    fine = x[np.isfinite(x)]
    norm = np.sqrt((fine**2).sum())
    zeros, nan, inf = (fine == 0).sum(), np.isnan(x).sum(), np.isinf(x).sum()
    return [x.size, fine.mean(), fine.std(), fine.min(), fine.max(), norm, zeros, nan, inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_every_statistic_is_that_of_all_elements(dtype):
    torch.manual_seed(0)
    tensors = [
        torch.randn(3, 5),
        torch.randn(3, 5) * 100 + 7,
        torch.zeros(4),
        torch.randn(2, 2, 2).relu(),
        torch.ones(1),
    ]
    tensors = [tensor.to(dtype) for tensor in tensors]
    found = measure(tensors).host()
    for row, tensor in zip(found, tensors, strict=True):
        np.testing.assert_allclose(row, truth(tensor), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quick", [False, True])
def test_single_numbers_are_their_own_statistics(quick):
    workspace = Workspace()
    for numbers in ([2.5, -3.0, 0.0], [-0.0, 7.0, 1e-30]):  # The second time in the memory of the first.
        tensors = [torch.tensor(number) for number in numbers]
        found = measure(tensors, workspace=workspace, name="x", quick=quick)
        assert found.finite()
        for row, tensor in zip(found.host(), tensors, strict=True):
            np.testing.assert_allclose(row, truth(tensor), rtol=1e-6)
    for odd in ("nan", "inf", "-inf"):
        assert not measure([torch.tensor(float(odd))], workspace=workspace, name="x", quick=quick).finite()


def test_the_spread_of_values_far_from_zero_does_not_drown():
    tensor = 1000 + torch.linspace(-1e-2, 1e-2, 4096)
    std = measure([tensor]).host()[0, COLUMNS.index("std")]
    assert std == pytest.approx(float(tensor.double().std(correction=0)), rel=1e-2)


def test_a_quick_measure_says_where_it_could_not_tell():
    torch.manual_seed(0)
    tensors = [torch.randn(4096) + 3, 1000 + torch.randn(4096) * 1e-2, torch.randn(100, 1000), torch.full((5,), 2.0)]
    quick, exact = measure(tensors, 8192, quick=True), measure(tensors, 8192)
    found, expected = quick.host(), exact.host()
    assert list(quick.drowned) == [1, 3]
    told = [0, 2]
    np.testing.assert_allclose(found[told], expected[told], rtol=1e-3)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("chunk", [2**8, 2**12, 2**18])
def test_tensors_of_several_shapes_share_matrices_and_each_has_its_own_numbers(monkeypatch, chunk, quick):
    monkeypatch.setattr(stacked_reductions, "CHUNK", chunk)
    torch.manual_seed(0)
    shapes = [(4, 16), (4, 16), (128,), (12, 16), (1,), (7,), (3, 300), (64,), (0,), (1,), (256, 2)]
    tensors = [torch.randn(shape) * (i + 1) + i for i, shape in enumerate(shapes)]
    tensors[2][5], tensors[3][2] = 0, 0
    workspace = Workspace()
    for _ in range(2):  # The second time everything is laid out already.
        found = measure(tensors, None, workspace=workspace, name="x", quick=quick).host()
        for row, tensor in zip(found, tensors, strict=True):
            if tensor.numel():
                np.testing.assert_allclose(row, truth(tensor), rtol=1e-4, atol=1e-6)
        tensors = [tensor * 2 for tensor in tensors]


def test_a_measure_is_there_when_the_next_one_was_made_in_the_same_memory():
    workspace = Workspace()
    first = measure([torch.ones(8)], workspace=workspace, name="x")
    measure([torch.zeros(8)], workspace=workspace, name="x")
    assert first.host()[0, COLUMNS.index("mean")] == 1


def test_lengths_that_have_much_in_common_take_few_operations():
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
            Count.seen += 1
            return function(*args, **(kwargs or {}))

    shapes = [(1, 16, width) for width in (128, 384, 128, 512, 512, 128) for _ in range(12)]
    tensors, workspace = [torch.randn(shape) for shape in shapes], Workspace()
    measure(tensors, workspace=workspace, name="x", quick=True)
    with Count():
        measure(tensors, workspace=workspace, name="x", quick=True)
    assert Count.seen < len(tensors) / 3


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_not_finite_shows_at_once(quick):
    tensors = [torch.randn(40), torch.randn(20)]
    assert measure(tensors, quick=quick).finite()
    tensors[1][3] = float("inf")
    assert not measure(tensors, quick=quick).finite()
    assert not measure([torch.full((100,), float("nan"))], 10, quick=quick).finite()


@pytest.mark.parametrize("large", [1e20, 3e38])
def test_numbers_whose_squares_are_too_large_to_be_numbers_are_looked_at(large):
    found = measure([torch.randn(999), torch.full((999,), large), torch.tensor(3.0)], quick=True)
    assert not found.finite()


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("count", [1, 3, 4, 33])
def test_one_that_is_not_finite_shows_beside_a_number_alone(number, count):
    tensor = torch.ones(count)
    tensor[-1] = number
    assert not measure([tensor, torch.tensor(3.0)], quick=True).finite()
    assert not measure([torch.tensor(3.0), torch.zeros(2), tensor], quick=True).finite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_row_whose_mean_may_drown_its_spread_shows_among_others(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(999), torch.randn(999), torch.zeros(999), torch.tensor(3.0), torch.full((999,), -2.0)]
    tensors = [tensor.to(dtype) for tensor in tensors]
    assert not measure(tensors[:-1], quick=True).may_drown()
    assert measure(tensors, quick=True).may_drown()
    assert not measure(tensors, quick=False).may_drown()


def test_what_kernels_have_counted_shows_in_their_own_rows_alone():
    plan = MeasurePlan([torch.zeros(3)] * 3, None)
    table = torch.zeros(3, len(COLUMNS) - 1, dtype=torch.float64)
    table[1, -2] = 1  # A NaN.
    for part, finite in ((slice(None), False), (slice(0, 1), True), (slice(1, None), False), (slice(2, None), True)):
        measured = Measured(plan)
        measured.add(slice(None), RowNumbers(table), part)
        assert measured.finite() is finite


def test_tensors_that_are_not_contiguous_are_measured_as_they_are():
    base = torch.randn(8, 6, 4)
    views = [base.transpose(0, 2), base[::2], base.permute(1, 2, 0)[..., 1:]]
    for row, view in zip(measure(views, 50).host(), views, strict=True):
        assert row[COLUMNS.index("norm")] == pytest.approx(float(view.norm()), rel=1e-5)


def test_a_large_tensor_is_sampled_but_its_norm_and_its_faults_are_not():
    torch.manual_seed(0)
    tensor = torch.randn(64, 1024) * 3 + 1
    row = dict(zip(COLUMNS, measure([tensor], 8192).host()[0].tolist(), strict=True))
    assert row["norm"] == pytest.approx(float(tensor.norm()), rel=1e-5)
    assert row["count"] == tensor.numel()
    assert row["mean"] == pytest.approx(1, abs=0.1)
    assert row["std"] == pytest.approx(3, rel=0.05)
    tensor[17, 311] = float("nan")
    assert np.isnan(measure([tensor], 64).host()[0, COLUMNS.index("norm")])


@pytest.mark.parametrize("shape", [(256, 1024), (32, 64, 32, 32), (8, 512, 768), (50257, 64), (3, 100003)])
def test_a_sample_is_spread_evenly_over_every_dimension(shape):
    for dim in range(len(shape)):
        view = [1] * len(shape)
        view[dim] = shape[dim]
        place = torch.arange(float(shape[dim])).view(view).expand(shape).contiguous() / shape[dim]
        row = dict(zip(COLUMNS, measure([place], 8192).host()[0].tolist(), strict=True))
        assert row["mean"] == pytest.approx(0.5 - 0.5 / shape[dim], abs=0.08), dim
        assert row["std"] == pytest.approx(float(place.std()), rel=0.12), dim


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(1, 500), st.sampled_from([1, 16]))
def test_a_sample_stays_inside_its_tensor_wherever_it_begins(shape, runs, run):
    count = int(np.prod(shape))
    if runs * run >= count:
        return
    step, room = spacing(tuple(shape), runs, run)
    assert step >= 1
    assert room >= 1
    assert room - 1 + (runs - 1) * step + run <= count


def test_what_is_not_finite_is_counted_and_the_rest_is_measured():
    tensor = torch.tensor([1.0, float("nan"), -float("inf"), 3.0, float("inf"), 0.0])
    np.testing.assert_allclose(whole(tensor), truth(tensor))
    nothing = dict(zip(COLUMNS, whole(torch.full((3,), float("nan"))).tolist(), strict=True))
    assert nothing["nan"] == 3
    assert np.isnan(nothing["min"])
    assert nothing["mean"] == 0


def test_what_cannot_be_measured_is_reported():
    assert plain("text") is None
    assert plain(torch.arange(3)) is None
    assert plain(torch.empty(2, device="meta")) is None
    assert plain(torch.ones(2, dtype=torch.complex64)).shape == (2, 2)
    sparse = torch.eye(3).to_sparse()
    assert plain(sparse).tolist() == [1.0, 1.0, 1.0]


def test_an_empty_tensor_has_a_row_of_nothing():
    assert measure([torch.empty(0, 3), torch.ones(2)]).host()[0].tolist() == [0] * len(COLUMNS)


@pytest.mark.parametrize("limit", [None, 64])
def test_a_snapshot_shows_how_far_tensors_have_moved(limit):
    torch.manual_seed(0)
    tensors = [torch.randn(20, 30), torch.randn(7)]
    before = [tensor.clone() for tensor in tensors]
    snapshot = Snapshot(tensors, limit, Workspace())
    for _ in range(2):
        snapshot.take()
        for tensor in tensors:
            tensor.add_(torch.full_like(tensor, 0.5))
        here, moved = snapshot.moved(None, [0, 1], [2, 3])
        np.testing.assert_allclose(moved.host()[:, COLUMNS.index("mean")], 0.5, rtol=1e-4)
        norms = moved.host()[:, COLUMNS.index("norm")]
        np.testing.assert_allclose(norms, [0.5 * 600**0.5, 0.5 * 7**0.5], rtol=1e-4)
    assert all((now - old).allclose(torch.ones(())) for now, old in zip(tensors, before, strict=True))
    assert here.host()[1, COLUMNS.index("mean")] == pytest.approx(float(tensors[1].mean()), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_statistic_of_a_snapshot_is_that_of_its_tensor_and_of_its_way(dtype):
    torch.manual_seed(0)
    shapes = [(64,), (), (3, 5), (100_000,), (64,), (90_000,), (1,)]  # More than one matrix takes, and lone numbers.
    tensors = [(torch.randn(shape) * 3 + 1).to(dtype) for shape in shapes]
    snapshot = Snapshot(tensors, None, Workspace())
    for _ in range(2):
        before = [tensor.double().clone() for tensor in tensors]
        snapshot.take()
        for tensor in tensors:
            tensor.mul_(1.5)
        here, moved = snapshot.moved(None, [], [])
        ways = [tensor.double() - old for tensor, old in zip(tensors, before, strict=True)]
        for found, expected in ((here, tensors), (moved, ways)):
            np.testing.assert_allclose(found.host(), [truth(each) for each in expected], rtol=2e-3, atol=2e-5)


def test_the_samples_of_a_snapshot_are_those_of_its_tensors_and_of_their_ways():
    tensors = [torch.full((64,), 2.0), torch.full((7,), 8.0), torch.full((200,), 32.0)]
    snapshot, sketch = Snapshot(tensors, None, Workspace()), Sketch()
    snapshot.take()
    for tensor in tensors:
        tensor.mul_(1.5)
    snapshot.moved(sketch, [0, 2, 4], [5, 3, 1])
    sketch.pour()
    bins = sketch.host(6)
    for row, value, many in ((0, 3.0, 32), (2, 12.0, 7), (4, 48.0, 32), (5, 1.0, 32), (3, 4.0, 7), (1, 16.0, 32)):
        np.testing.assert_array_equal(bins[row], many * np.histogram([value], edges())[0])


# ------------------------------------------------------------------------------------------------------------- sketch


def test_the_bins_hold_what_their_edges_say():
    bounds = edges()
    values = torch.tensor([-3.1, -1e-3, 0.0, 1e-20, 0.7, 1.0, 1.99, 500.0])
    sketch = Sketch()
    sketch.take(values, BinPlaces([(0, len(values), [3])]), 0)
    sketch.pour()
    bins = sketch.host(4)
    assert bins[:3].sum() == 0
    assert bins[3].sum() == len(values)
    expected = np.histogram(np.where(values.abs() < 2**-44, 0.0, values), bounds)[0]
    np.testing.assert_array_equal(bins[3], expected)


def test_a_quantile_is_off_by_a_sixteenth_at_most():
    torch.manual_seed(0)
    sketch, values, places = Sketch(), [], BinPlaces([(0, 32, [0, 1])])
    for step in range(80):
        matrix = torch.randn(2, 32) * torch.tensor([[1.0], [1e-4]])
        sketch.take(matrix.view(-1), places, step)
        sketch.pour()
        values.append(matrix)
    bins = sketch.host(2)
    at = [0.01, 0.1, 0.25, 0.75, 0.9, 0.99]
    for row in range(2):
        exact = np.quantile(torch.cat(values, 1)[row], at, method="inverted_cdf")
        np.testing.assert_allclose(quantiles(bins[row], at), exact, rtol=1 / 16 + 1e-6)


def test_samples_are_counted_where_others_were_in_inference_mode():
    sketch = Sketch()
    with torch.inference_mode():  # As kernels of our own count theirs while tensors are measured.
        sketch.room(torch.device("cpu"), 2)[0, 1] += 5
    sketch.take(torch.full((32,), 3.0), BinPlaces([(0, 32, [1])]), 0)
    sketch.pour()
    assert sketch.host(2).sum(1).tolist() == [5, 32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_samples_of_long_tensors_are_those_of_each_in_every_phase(dtype):
    step, room = spacing((1, 700), 32)
    places, sketch = BinPlaces([(100, 700, [2, 0, 1]), (10, 20, [3])]), Sketch()
    phases = [0, 1, 5, 1000, 0]
    for phase in phases:
        flat = torch.zeros(2200, dtype=dtype)
        flat[10:30] = 7.0
        lines = flat[100:].view(3, 700)
        lines.copy_(torch.arange(1.0, 4.0).unsqueeze(1).expand(3, 700))
        lines[:, phase % room + step * np.arange(32)] *= 16  # What is read is four octaves up.
        sketch.take(flat, places, phase)
    sketch.pour()
    bins = sketch.host(4)
    for row, value, many in ((2, 16.0, 32), (0, 32.0, 32), (1, 48.0, 32), (3, 7.0, 20)):
        np.testing.assert_array_equal(bins[row], len(phases) * many * np.histogram([value], edges())[0])


def test_samples_are_counted_under_the_rows_of_their_own_call():
    sketch, workspace = Sketch(), Workspace()
    tensors, some, others = [torch.full((64,), 2.0), torch.full((64,), 8.0)], [0, 1], [3, 2]
    for rows in (some, others, some):
        measure(tensors, sketch=sketch, rows=rows, workspace=workspace)
    sketch.pour()
    bins = sketch.host(4)
    for row, value, many in ((0, 2.0, 64), (1, 8.0, 64), (3, 2.0, 32), (2, 8.0, 32)):
        np.testing.assert_array_equal(bins[row], many * np.histogram([value], edges())[0])


def test_the_samples_of_tensors_that_share_a_matrix_are_those_of_each():
    shapes = [(64,), (128,), (64,), (3, 64), (1,), (16,)]
    values = [2.0**exponent for exponent in range(len(shapes))]
    tensors = [torch.full(shape, value) for shape, value in zip(shapes, values, strict=True)]
    sketch, rows = Sketch(), [5, 3, 1, 0, 2, 4]
    measure(tensors, sketch=sketch, rows=rows)
    sketch.pour()
    bins = sketch.host(len(rows))
    for row, tensor, value in zip(rows, tensors, values, strict=True):
        np.testing.assert_array_equal(bins[row], min(32, tensor.numel()) * np.histogram([value], edges())[0])


def test_samples_of_many_matrices_and_steps_are_counted_under_their_own_rows():
    many = sketch_module.LOT * 2 + 5
    places = [BinPlaces([(0, 8, [2 * i, 2 * i + 1])]) for i in range(many)]
    sketch, counts = Sketch(), torch.zeros(2 * many)
    for step in range(3):  # The last one ends early.
        for i in range(many if step < 2 else 7):
            sketch.take(torch.full((2, 8), 2.0 ** (i - many // 2)), places[i], 0)
            counts[2 * i : 2 * i + 2] += 8
    for _ in range(2):  # The second time there is nothing to count.
        sketch.pour()
        found = sketch.host(2 * many)
        assert found.sum(1).tolist() == counts.tolist()
        assert len(sketch._lots) == 4, "two steps are cut alike, in three parts, and the last one is another"
    for row in range(2 * many):
        assert quantiles(found[row], [0.5]) == pytest.approx([2.0 ** (row // 2 - many // 2)], rel=1 / 16)


def test_bins_beyond_what_a_short_integer_holds_are_counted_with_long_ones():
    assert BinPlaces([(0, 1, [2**21 - 2])]).bins.dtype == np.int32
    assert BinPlaces([(0, 1, [2**21])]).bins.tolist() == [2**31]


def test_a_histogram_counts_every_sample_by_octaves():
    sketch = Sketch()
    sketch.take(torch.tensor([1.0, 1.5, 2.5, -4.0]), BinPlaces([(0, 4, [0])]), 0)
    sketch.pour()
    bounds, counts = histogram(sketch.host(1)[0])
    assert sum(counts) == 4
    assert len(bounds) == len(counts) + 1
    assert counts[-1] == 1
    assert bounds[-2:] == [2.0, 4.0]
    assert histogram(sketch.host(2)[1]) == ([], [])
