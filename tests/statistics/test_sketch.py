"""Histograms from a sketch, against those of NumPy from all samples."""

import numpy as np
import pytest
import torch

from tenterhook.statistics.sketch import FEWEST_BARS, MOST_BARS, BinPlaces, Sketch, even_bins

CASES = 120


def sketched(values):
    sketch = Sketch()
    for part in values.float().split(32):
        sketch.take(part.clone(), BinPlaces([(0, len(part), [0])]), 0)
    sketch.pour()
    return sketch.host(1)[0]


def drawn(seed):
    """Samples of some distribution, some of them rectified or with outliers."""
    random = np.random.default_rng(seed)
    count = int(random.choice([32, 96, 1_000, 10_000]))
    scale, shift = 10.0 ** random.uniform(-6, 3), random.normal() * random.choice([0, 1, 10])
    values = [random.normal, random.laplace, random.uniform, random.exponential, random.standard_cauchy][seed % 5](
        size=count
    )
    values = (values + shift) * scale
    if seed % 3 == 0:
        values = np.maximum(values, 0)
    if seed % 7 == 0:
        values[: max(1, count // 200)] = 5e4
    return torch.from_numpy(np.clip(values, -(2.0**19), 2.0**19)).float()


@pytest.mark.parametrize("seed", range(CASES))
def test_bars_of_equal_width_count_what_numpy_counts(seed):
    values = drawn(seed)
    low, high, counts = even_bins(sketched(values))
    array = values.double().numpy()
    assert FEWEST_BARS <= len(counts) <= MOST_BARS
    assert low < high
    ends = np.linspace(low, high, len(counts) + 1)
    for bar in range(1, len(counts)):
        mine = counts[:bar].sum()
        exact = np.count_nonzero((array >= low) & (array < ends[bar]))
        # A sketch knows a value to within an eighth of its size, and what is left out to within one of its own bins.
        doubtful = sum(np.count_nonzero(np.abs(array - end) <= abs(end) / 8 + 2.0**-44) for end in (ends[bar], low))
        assert abs(mine - exact) <= doubtful + 1e-6
    inside = np.count_nonzero((array >= low) & (array <= high))
    assert counts.sum() >= 0.97 * len(array)
    assert counts.sum() <= len(array) + 1e-6
    assert abs(counts.sum() - inside) <= 0.03 * len(array) + 1


def test_one_value_is_a_bar_in_the_middle_and_nothing_is_none():
    for value in (0.0, 3.0, -1e-3):
        low, high, counts = even_bins(sketched(torch.full((64,), value)))
        assert low < value < high
        assert counts.tolist() == [0, 0, 64, 0, 0]
    assert len(even_bins(np.zeros(1024, int))[2]) == 0
