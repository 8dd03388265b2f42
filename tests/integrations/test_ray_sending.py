"""What is sent to a worker, and what a worker does, without Ray."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.harvest.harvest_plan import settle
from tenterhook.harvest.job import Job
from tenterhook.harvest.rows import RowRule
from tenterhook.harvest.runners import HarvestOptions
from tenterhook.integrations.ray import _as_many_as_fit, _Maker, _to_send
from tenterhook.store.format import committed
from tenterhook.store.place import Directory


def test_parts_of_one_tensor_are_sent_without_the_rest_of_it():
    whole = torch.randn(400, 250)
    parts = [{"x": part, "name": "a"} for part in whole.split(4)]
    assert len(pickle.dumps(parts)) > 50 * whole.nbytes  # Each brings all.
    sent = pickle.loads(pickle.dumps(_to_send(parts)))
    assert len(pickle.dumps(_to_send(parts))) < 2 * whole.nbytes
    assert torch.equal(torch.cat([part["x"] for part in sent]), whole)


def test_what_is_whole_is_sent_as_it_is():
    batch, own = torch.ones(3), torch.zeros(3)
    sent = _to_send([batch, own])
    assert sent[0] is batch
    assert _to_send(own) is own


def test_a_path_is_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert _to_send("tokens.npy") == Path(tmp_path / "tokens.npy")


def test_there_is_a_worker_for_each_gpu_or_for_each_cpu_but_one():
    machine = {"CPU": 16.0, "GPU": 2.0, "memory": 1e9}
    assert _as_many_as_fit(machine, on_gpu=True) == 2
    assert _as_many_as_fit(machine, on_gpu=False) == 15
    assert _as_many_as_fit({"CPU": 1.0}, on_gpu=False) == 1


class Sometimes(nn.Module):
    """Fails once, at its seventh call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, value):
        self.calls += 1
        if self.calls == 7:
            raise RuntimeError("once")
        return value * 2


def test_a_worker_that_failed_within_a_shard_makes_all_of_it_the_second_time(tmp_path):
    batches = [torch.full((4, 3), float(number)) for number in range(12)]
    cutting = {"batch_size": None, "tokenizer": None, "length": 512}
    asked = {"shard_rows": 16, "shard_bytes": None}
    options = HarvestOptions(to=tmp_path, asked=asked, cutting=cutting, memory=1 << 20, engine="ray")
    job = Job(Sometimes(), (":return",), RowRule())
    plan = settle(Directory(tmp_path), job, options.source(batches), options)
    maker = _Maker(lambda: job, batches, options, plan, job.found)
    assert maker({"item": [0]})["made"] == 1
    with pytest.raises(RuntimeError, match="once"):
        maker({"item": [1]})
    assert committed(Directory(tmp_path)) == [0]
    assert [maker({"item": [shard]})["made"].item() for shard in (0, 1, 2)] == [0, 1, 1]
    assert torch.equal(th.open(tmp_path)[":return"][:], torch.cat(batches) * 2)
    assert not list(tmp_path.rglob(".tenterhook-*"))
    maker.writer.close()
