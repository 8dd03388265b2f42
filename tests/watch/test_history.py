"""The running statistics of a watch, whatever rows each step brings."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenterhook.statistics.measure import measure
from tenterhook.watch.history import History

ROWS = 4
# Which rows a step brings: some of them are named by the same array again and again, as those of like steps are.
steps = st.lists(st.sampled_from([(0, 1, 2), (1,), (0, 3), (3, 2, 1, 0), (2, 2, 1)]), min_size=1, max_size=25)


@settings(deadline=None)
@given(steps, st.integers(0, 2**16))
def test_every_row_has_the_elements_of_all_its_steps(sequence, seed):
    generator = np.random.default_rng(seed)
    books, arrays = History(pages=100), {}
    for row in range(ROWS):
        books.row("values", f"place {row}")
    elements, latest, count = [[] for _ in range(ROWS)], {}, [0] * ROWS
    for step, rows in enumerate(sequence):
        tensors = [torch.from_numpy(generator.normal(size=3).astype(np.float32)) for _ in rows]
        books.add(arrays.setdefault(rows, np.array(rows)), measure(tensors).host(), [])
        books.close_step(step)
        for row in set(rows):
            found = torch.cat([tensor for each, tensor in zip(rows, tensors, strict=True) if each == row])
            elements[row].append(found)
            latest[row] = step, found
            count[row] += 1
    found = {row["address"]: row for row in books.rows()}
    assert len(found) == len(latest)
    for row, (step, last) in latest.items():
        told, x = found[f"place {row}"], torch.cat(elements[row]).double().numpy()
        assert (told["steps"], told["last"]["step"], told["count"]) == (count[row], step, len(x))
        assert told["last"]["mean"] == pytest.approx(float(last.mean()), abs=1e-5)
        expected = [x.mean(), x.std(), x.min(), x.max(), np.linalg.norm(x)]
        assert [told[name] for name in ("mean", "std", "min", "max", "norm")] == pytest.approx(expected, abs=1e-5)
