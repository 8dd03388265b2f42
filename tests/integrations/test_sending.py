"""What is sent to a worker elsewhere, without Ray."""

import pickle
from pathlib import Path

import torch

from tenterhook.integrations.ray import _as_many_as_fit, _to_send


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
