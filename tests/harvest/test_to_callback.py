"""Rows that are given to a function and not stored."""

import threading
import time

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook._tensor_bytes import as_bytes
from tenterhook.harvest.job import Job
from tenterhook.harvest.to_callback import CallbackWriter
from tenterhook.store.device_copy import Piece

x = torch.randn(40, 4)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


def expected(model, point):
    return torch.cat([model[: point + 1](part) for part in x.split(10)])


def test_a_function_gets_the_rows_of_every_batch_in_their_order(tmp_path):
    model, seen, threads = net(), [], set()

    def keep(rows):
        threads.add(threading.current_thread())
        seen.append(rows)

    done = th.harvest(model, x, "0", "2", to=keep, batch_size=10)
    assert [list(rows) for rows in seen] == [["0", "2", "sample"]] * 4
    for point in (0, 2):
        assert torch.equal(torch.cat([rows[str(point)] for rows in seen]), expected(model, point))
    assert torch.cat([rows["sample"] for rows in seen]).tolist() == list(range(40))
    assert threading.main_thread() not in threads
    assert (done.rows, done.made) == (40, 0)
    assert "keep" in repr(done)
    assert "shards" not in repr(done)
    with pytest.raises(th.HarvestError, match="not stored"):
        done.open()


def test_masks_reductions_and_gradients_are_as_in_a_store():
    batches = [{"input": torch.randn(3, 5, 4), "attention_mask": torch.arange(5).expand(3, 5) < 4}] * 2
    seen, model = [], net()
    calls = {"call": lambda model, batch: model(batch["input"])}
    th.harvest(model, batches, "1", to=seen.append, rows="token", **calls)
    assert torch.equal(seen[0]["1"], model[:2](batches[0]["input"])[:, :4].flatten(0, 1))
    assert seen[0]["position"].tolist() == [0, 1, 2, 3] * 3
    th.harvest(model, x, "1", to=seen.append, grad=lambda output, _: output.sum())
    assert torch.allclose(seen[-1]["1.grad"], model[2].weight.sum(0).expand(8, 8))


def test_what_goes_wrong_in_the_function_is_raised_and_nothing_more_is_given():
    calls = []

    def fail(rows):
        calls.append(len(rows["1"]))
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        th.harvest(net(), [part for part in x.split(1) for _ in range(20)], "1", to=fail)
    assert calls == [1]
    assert not [thread for thread in threading.enumerate() if thread.name == "tenterhook-give"]


def test_a_slow_function_makes_the_model_wait_and_memory_is_bounded():
    batches, together = [torch.randn(64, 512) for _ in range(12)], []

    def slow(rows):
        time.sleep(0.05)
        together.append(rows[":return"].sum())

    done = th.harvest(nn.Identity(), batches, ":return", to=slow, memory=400_000)
    assert done.peak <= 400_000
    assert done.limit == "function"
    assert torch.equal(torch.stack(together), torch.stack([batch.sum() for batch in batches]))


def test_shards_and_workers_have_no_meaning_there():
    for options in ({"shard_rows": 5}, {"engine": "ray"}, {"engine": "ranks"}):
        with pytest.raises(ValueError, match="to= is a function"):
            th.harvest(net(), x, "1", to=print, **options)


# -- as from a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ring(monkeypatch):
    """A ring of memory that is overwritten when it is given back."""
    released = []

    def ahead(_giver, rows):
        copy = rows.clone()

        def release():
            released.append(copy)
            copy.fill_(torch.nan)

        return Piece(as_bytes(copy), lambda: 0.25, release)

    monkeypatch.setattr(CallbackWriter, "ahead", ahead)
    monkeypatch.setattr(Job, "begins", lambda _, begin: begin)
    return released


@pytest.fixture
def plain_bf16():
    """On some CPUs the bf16 of oneDNN dies."""
    torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(True)


@pytest.mark.usefixtures("plain_bf16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_given_where_the_copy_put_them(ring, dtype):
    model, seen = net().to(dtype), []

    def look(rows):
        assert len(ring) % 2 == 0
        assert all(rows[name].dtype == dtype for name in "01")
        seen.append({name: rows[name].clone() for name in rows})

    th.harvest(model, x.to(dtype), "0", "1", to=look, batch_size=10)
    assert len(ring) == 8
    stored = torch.cat([rows["1"] for rows in seen])
    assert torch.equal(stored, torch.cat([model[:2](part.to(dtype)) for part in x.split(10)]))


@pytest.mark.parametrize("keep", [lambda rows: rows, lambda rows: rows["1"], lambda rows: rows["1"][0].numpy()])
def test_a_function_that_keeps_what_will_be_overwritten_is_reported(ring, keep):
    kept = []
    with pytest.raises(th.HarvestError, match=r"rows\['[01]'\].clone"):
        th.harvest(net(), x, "0", "1", to=lambda rows: kept.append(keep(rows)), batch_size=10)
    assert len(kept) == 1
    assert ring
