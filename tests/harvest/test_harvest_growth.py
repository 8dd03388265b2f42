"""The time and the memory of a harvest grow with its rows, and no faster."""

import sys
import time

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.harvest import batch_source as sources

ROWS = (5_000, 50_000, 500_000)


def test_the_samples_before_a_batch_are_counted_once(monkeypatch):
    counted = []
    plain = sources.size_of
    monkeypatch.setattr(sources, "size_of", lambda batch: (counted.append(1), plain(batch))[1])
    listed = sources.Listed([torch.ones(3, 2)] * 1000)
    assert [listed.samples_before(batch) for batch in range(1001)] == list(range(0, 3001, 3))
    assert len(counted) == 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_time_grows_with_the_rows_and_no_faster(tmp_path, capsys, kind):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    seconds = {}
    for rows in ROWS:
        data = torch.randn(rows, 8)
        batches = data if kind == "tensor" else list(data.split(50))
        best = float("inf")
        for turn in range(2):
            began = time.perf_counter()
            th.harvest(model, batches, "1", to=tmp_path / f"{rows}-{turn}", batch_size=50, shard_rows=5000)
            best = min(best, time.perf_counter() - began)
        seconds[rows] = best
    began = time.perf_counter()
    assert len(th.open(tmp_path / f"{ROWS[-1]}-0")) == ROWS[-1]
    opened = time.perf_counter() - began
    with capsys.disabled():
        told = ", ".join(f"{rows:,} rows {each:.2f} s" for rows, each in seconds.items())
        sys.stdout.write(f"\nharvest of a {kind}: {told}; opened in {opened:.3f} s\n")
    assert seconds[500_000] / seconds[50_000] < 15
