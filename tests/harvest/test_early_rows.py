"""Rows that leave the device while the model runs, with a stage that stands in for a GPU's."""

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook._tensor_bytes import as_bytes
from tenterhook.harvest.job import Job
from tenterhook.store.device_copy import Piece

x = torch.randn(40, 4)


class Copied:
    """Copies at once, as a GPU's stage does, and keeps count."""

    def __init__(self, room=10**9):
        self.begun, self.released, self.room = [], [], room

    def __call__(self, tensor):
        if self.room < tensor.nbytes:
            return None
        self.room -= tensor.nbytes
        copy = tensor.clone()
        self.begun.append(copy)

        def release():
            self.room += copy.nbytes
            self.released.append(copy)

        return Piece(as_bytes(copy), lambda: 0.0, release)


@pytest.fixture
def copied(monkeypatch):
    """Harvest as from a GPU."""
    found = Copied()
    # Before there is a writer, nothing begins.
    monkeypatch.setattr(Job, "begins", lambda _, begin: found if hasattr(begin, "__self__") else begin)
    return found


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("room", [10**9, 400, 0])
def test_rows_are_the_same_however_many_of_them_were_begun(tmp_path, copied, room):
    copied.room = room
    model = net()
    th.harvest(model, x, "0", "1", "2", to=tmp_path / "ahead", batch_size=10, shard_rows=20)
    with th.record(model, "*") as tape:
        model(x)
    store = th.open(tmp_path / "ahead")
    for address in ("0", "1", "2"):
        assert torch.equal(store[address][:], torch.cat([model[: int(address) + 1](part) for part in x.split(10)]))
        assert store[address][:].shape == tape[address].shape
    # The first of four batches is run before there is a writer.
    assert len(copied.begun) in {10**9: [9], 400: range(1, 7), 0: [0]}[room]
    assert len(copied.released) == len(copied.begun)
    assert copied.room == room


def test_rows_are_begun_when_they_pass_and_not_afterwards():
    model, seen = net(), []
    model[2].register_forward_pre_hook(lambda *_: seen.append(len(copied.begun)))
    job, copied = _job(model, "0", "1"), Copied()
    job.stop = False
    made = job.run(x, 0, copied)
    assert seen == [2]
    assert [key for key, _ in made.begun] == [("0", "value"), ("1", "value")]


def test_masks_and_reductions_are_applied_to_what_is_begun(tmp_path, copied):
    batches = [{"input": torch.randn(3, 5, 4), "attention_mask": torch.arange(5).expand(3, 5) < 4}] * 2
    calls = {"call": lambda model, batch: model(batch["input"])}
    th.harvest(net(), batches, "1", to=tmp_path / "tokens", rows="token", **calls)
    th.harvest(net(), batches, "1", to=tmp_path / "last", reduce="last", **calls)
    assert [len(each) for each in copied.begun] == [12, 3]
    value = net()[:2](batches[0]["input"])
    assert torch.equal(th.open(tmp_path / "tokens")["1"][12:], value[:, :4].flatten(0, 1))
    assert torch.equal(th.open(tmp_path / "last")["1"][3:], value[:, 3])


class Overwrites(nn.Module):
    """Changes the output of its first layer in place, without any sign beforehand."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, batch):
        value = self.first(batch)
        torch.add(value, 1, out=value)
        return value


def test_a_value_that_is_overwritten_after_it_was_begun_is_not_stored_from_there(tmp_path, copied):
    torch.manual_seed(0)
    model = Overwrites()
    th.harvest(model, x, "first", to=tmp_path / "acts", batch_size=10, stop=False)
    stored = th.open(tmp_path / "acts")["first"][:]
    assert torch.equal(stored, torch.cat([model.first(part) for part in x.split(10)]))
    assert len(copied.released) == len(copied.begun)


def test_what_is_called_twice_or_copied_is_not_begun_in_vain_for_long(tmp_path, copied):
    layer = nn.Linear(4, 4)
    torch.manual_seed(0)
    th.harvest(nn.Sequential(layer, layer), x, "0#1", to=tmp_path / "acts", batch_size=10)
    assert not copied.begun
    expected = torch.cat([layer(layer(part)) for part in x.split(10)])
    assert torch.equal(th.open(tmp_path / "acts")["0#1"][:], expected)
    in_place = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))  # Its values are copied when they are recorded.
    th.harvest(in_place, x, "0", to=tmp_path / "copied", batch_size=10)
    assert len(copied.begun) == 1
    assert torch.equal(th.open(tmp_path / "copied")["0"][:], torch.cat([in_place[0](part) for part in x.split(10)]))


def _job(model, *points):
    from tenterhook.harvest.rows import RowRule

    return Job(model, points, RowRule())
