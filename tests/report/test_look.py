"""Numbers and layouts of tensors, against numpy and by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tenterhook._look.layout import lay_out, quantised
from tenterhook._look.numbers import moments, numbers

FLOATS = st.floats(-1e6, 1e6, width=32)


@given(arrays.arrays(np.float32, arrays.array_shapes(max_dims=3, max_side=9), elements=FLOATS))
def test_numbers_are_those_of_numpy(values):
    found = numbers(torch.from_numpy(values))
    wide = values.astype(np.float64)
    assert found.count == values.size
    assert (found.low, found.high) == (wide.min(), wide.max())
    assert found.mean == pytest.approx(wide.mean(), rel=1e-6, abs=1e-6)
    spread = wide.std(ddof=1) if values.size > 1 else 0.0
    assert found.std == pytest.approx(spread, rel=1e-3, abs=1e-3 * max(1.0, abs(wide).max()) * 1e-3)
    assert found.norm == pytest.approx(np.linalg.norm(wide.ravel()), rel=1e-6)
    assert found.zeros == (values == 0).sum()
    assert sum(found.histogram) == values.size


def test_a_histogram_is_that_of_numpy():
    values = torch.randn(10_000)
    found = numbers(values)
    expected, edges = np.histogram(values.numpy(), bins=len(found.histogram))
    assert (found.low, found.high) == (pytest.approx(edges[0]), pytest.approx(edges[-1]))
    # A value on the edge of two bins may be counted on either side of it.
    assert np.abs(np.array(found.histogram) - expected).sum() <= 4


def test_what_is_no_number_is_counted_apart():
    found = numbers(torch.tensor([1.0, 3.0, torch.nan, torch.inf, -torch.inf, 0.0]))
    assert (found.nans, found.infs, found.zeros, found.mean, found.low, found.high) == (1, 2, 1, 4 / 3, 0.0, 3.0)
    assert sum(found.histogram) == 3


@pytest.mark.parametrize("values", [[torch.nan], [torch.inf] * 3, []])
def test_where_nothing_is_finite_there_are_no_moments(values):
    found = numbers(torch.tensor(values))
    assert (found.count, found.nans + found.infs, found.histogram) == (len(values), len(values), ())
    assert np.isnan([found.mean, found.std, found.low, found.high, found.norm, found.rms]).all()


@pytest.mark.parametrize("size", [1e-200, 1e-35, 1e-22, 1e18, 1e35, 1e200])
def test_numbers_hold_for_sizes_whose_squares_are_none(size):
    values = torch.randn(1000, dtype=torch.float64) * size
    found, plain = numbers(values if abs(np.log10(size)) > 38 else values.float()), values / size
    assert found.std == pytest.approx(plain.std().item() * size, rel=1e-5)
    assert found.norm == pytest.approx(plain.norm().item() * size, rel=1e-5)
    expected, _ = np.histogram(plain.numpy(), bins=len(found.histogram))
    assert np.abs(np.array(found.histogram) - expected).sum() <= 4


def test_counts_are_exact_beyond_what_a_float_counts():
    values = torch.zeros(2**24 + 2**20)
    values[:5] = 1
    assert sum(numbers(values).histogram) == values.numel()


def test_the_scale_of_a_picture_is_not_that_of_one_column():
    values = torch.rand(16384, 64)
    values[:, 0] *= 1e-3
    low, high = numbers(values).scale
    assert low < 0.01
    assert high > 0.95


def test_moments_are_the_numbers_without_what_a_picture_needs():
    values = torch.tensor([1.0, 3.0, torch.nan])
    found, whole = moments(values), numbers(values)
    assert (found.mean, found.std, found.nans, found.histogram) == (whole.mean, whole.std, 1, ())
    assert moments(torch.empty(2, device="meta")) is None


def test_the_largest_floats_have_a_histogram():
    most = torch.finfo(torch.float32).max
    found = numbers(torch.tensor([-most, most, 0.1, 0.2]))
    assert found.histogram == (1, 0, 0, 0, 2, 0, 0, 1)
    assert found.infs == 0
    assert numbers(torch.tensor([-1e308, 1e308], dtype=torch.float64)).histogram == (1, 0, 0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([True, False]),
        lambda: torch.arange(5),
        lambda: torch.tensor([1 + 1j]),
        lambda: torch.ones(3, dtype=torch.float8_e4m3fn),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.zeros(0),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ],
    ids=["bool", "int", "complex", "float8", "sparse", "empty", "quantised"],
)
@pytest.mark.filterwarnings("ignore")  # PyTorch warns of quantised tensors
def test_every_kind_of_tensor_has_numbers(make):
    tensor = make()
    assert numbers(tensor).count == tensor.numel()


def test_a_tensor_without_memory_has_none():
    assert numbers(torch.ones(2, device="meta")) is None
    assert lay_out(torch.ones(2, device="meta")) is None


LAYOUTS = {
    "a batch of images": ((2, 3, 8, 9), {}, "maps", (3, 8, 9), (0, 2)),
    "one image without a batch": ((3, 8, 9), {"module": "Conv2d"}, "maps", (3, 8, 9), None),
    "a sequence": ((2, 5, 7), {}, "matrix", (1, 5, 7), (0, 2)),
    "channels last": ((1, 4, 4, 6), {"module": "LayerNorm"}, "maps", (6, 4, 4), (0, 1)),
    "a pooled image": ((1, 6, 1, 1), {}, "vector", (1, 1, 6), (0, 1)),
    "a video": ((1, 2, 3, 4, 5), {}, "maps", (6, 4, 5), (0, 1)),
    "filters": ((4, 3, 5, 5), {"parameter": True}, "maps", (12, 5, 5), None),
    "a vector": ((7,), {}, "vector", (1, 1, 7), None),
    "one row": ((1, 7), {}, "vector", (1, 1, 7), None),
    "rows": ((2, 7), {}, "matrix", (1, 2, 7), None),
    "a number": ((), {}, "number", (1, 1, 1), None),
}


@pytest.mark.parametrize(("shape", "more", "kind", "whole", "example"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_tensor_is_laid_out_by_its_shape(shape, more, kind, whole, example):
    made = lay_out(torch.zeros(shape), **more)
    assert (made.kind, made.whole, made.example) == (kind, whole, example)
    assert tuple(made.values.shape) == whole


def test_a_mask_does_not_take_the_scale_from_the_rest():
    scores = torch.tensor([[[[-2.0, 4.0], [1.0, torch.finfo(torch.float32).min]]]])
    assert numbers(scores).scale == (-2.0, 4.0)
    levels, low, high = quantised(scores[0])
    assert (low.item(), high.item()) == (-2.0, 4.0)
    assert levels[0].tolist() == [[2, 254], [128, 1]]


def test_what_lies_beyond_has_one_level_in_all_maps():
    lowest = torch.finfo(torch.float32).min
    levels, *_ = quantised(torch.tensor([[[0.0, 1.0, lowest]], [[-5.0, 9.0, lowest]], [[2.0, 3.0, -lowest]]]))
    assert levels[:, 0].tolist() == [[2, 254, 1], [2, 254, 1], [2, 254, 255]]


def test_channels_that_come_last_are_put_first():
    values = torch.randn(1, 4, 4, 6)
    assert torch.equal(lay_out(values).values[5], values[0, :, :, 5])


def test_a_bounded_layout_has_the_means_of_neighbours():
    values = torch.arange(64.0).reshape(1, 1, 8, 8).expand(1, 3, 8, 8)
    made = lay_out(values).bounded(2, 4, 4)
    assert tuple(made.values.shape) == (2, 4, 4)
    assert made.values[0, 0, 0] == values[0, 0, :2, :2].mean()
    assert made.whole == (3, 8, 8)


@given(arrays.arrays(np.float32, (3, 4, 5), elements=st.floats(-(2.0**99), 2.0**99, width=32) | st.just(np.nan)))
def test_bytes_give_the_values_back_to_within_a_step(values):
    maps = torch.from_numpy(values)
    levels, low, high = quantised(maps)
    back = low[:, None, None].double() + (levels.double() - 1) / 254 * (high - low)[:, None, None].double()
    finite = maps.isfinite()
    assert torch.equal(levels == 0, ~finite)
    step = ((high.double() - low.double()) / 254)[:, None, None].expand_as(back)
    assert bool(((back - maps.double()).abs()[finite] <= step[finite] * 0.51 + 1e-30).all())
