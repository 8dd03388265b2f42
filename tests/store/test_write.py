"""The writer's threads: what waits for what."""

import threading

import pytest
import torch

import tenterhook as th
from tenterhook.store.format import StoredColumn, committed
from tenterhook.store.place import Directory
from tenterhook.store.write import Writer

COLUMN = StoredColumn("x", "value", "x", "F32", (4,))
ROWS = torch.ones(10, 4)


class Slow(Directory):
    """A disk on which a commit takes as long as somebody likes."""

    def __init__(self, root):
        super().__init__(root)
        self.may_go_on, self.failing = threading.Event(), ""

    def publish(self, spooled):
        self.may_go_on.wait(10)
        if self.failing and any(self.failing in name for name in spooled):
            raise OSError(28, "No space left on device")
        super().publish(spooled)


@pytest.fixture
def place(tmp_path):
    return Slow(tmp_path / "acts")


def test_rows_of_the_next_shard_are_written_while_one_is_committed(place):
    writer = Writer(place, 10**6)
    for shard in range(2):
        writer.put(shard, COLUMN, ROWS)
        if shard == 0:
            writer.end(shard, (COLUMN,), {"rows": 10})
    for _ in range(1000):
        if not writer.budget.used:
            break
        threading.Event().wait(0.01)
    assert not writer.budget.used  # All rows are written, and their memory is free.
    assert not committed(place)
    place.may_go_on.set()
    writer.drain()
    assert committed(place) == [0]
    writer.end(1, (COLUMN,), {"rows": 10})
    writer.close()
    assert committed(place) == [0, 1]


def test_who_waits_for_a_mark_waits_for_what_was_put_before_it_and_no_more(place):
    writer = Writer(place, 10**6)
    writer.put(0, COLUMN, ROWS)
    writer.end(0, (COLUMN,), {"rows": 10})
    wait = writer.mark()
    waiting = threading.Thread(target=wait)
    waiting.start()
    writer.put(1, COLUMN, ROWS)
    for _ in range(1000):
        if not writer.budget.used:
            break
        threading.Event().wait(0.01)
    assert not writer.budget.used  # The next rows are written while somebody waits for the commit.
    assert waiting.is_alive()
    place.may_go_on.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert committed(place) == [0]
    writer.close()


def test_who_waits_for_a_mark_is_reported_a_commit_that_failed(place):
    place.failing = "00000000"
    writer = Writer(place, 10**6)
    writer.put(0, COLUMN, ROWS)
    writer.end(0, (COLUMN,), {"rows": 10})
    wait = writer.mark()
    place.may_go_on.set()
    with pytest.raises(th.StoreError, match="could not be written"):
        wait()
    writer.close(quiet=True)


def test_a_sweep_of_some_shards_leaves_the_others_alone(tmp_path):
    place = Directory(tmp_path)
    left = {place.spool(f"{folder}/x.safetensors"): folder for folder in ("shards/00000003", "shards/00000004")}
    left |= {place.spool(f"commits/{shard:08d}.json"): f"commits/{shard}" for shard in (3, 4)}
    for file in left:
        file.touch()
    assert place.sweep([3]) == 2
    assert sorted(left[file] for file in left if file.exists()) == ["commits/4", "shards/00000004"]
    assert place.sweep(range(4, 6)) == 2


def test_a_commit_that_fails_is_reported_and_no_later_one_is_made(place):
    place.failing = "00000001"
    place.may_go_on.set()
    writer = Writer(place, 10**6)
    with pytest.raises(th.StoreError, match="The 1 committed shards are complete"):
        for shard in range(4):
            writer.put(shard, COLUMN, ROWS)
            writer.end(shard, (COLUMN,), {"rows": 10})
        writer.drain()
    writer.close(quiet=True)
    assert committed(place) == [0]
    assert not list(place.root.rglob(".tenterhook-*"))


def test_what_is_handed_without_a_column_is_given_back_and_not_written(place):
    place.may_go_on.set()
    writer = Writer(place, 10**6)
    (piece,) = writer._host.stage(ROWS)  # As a stage ahead of its use would give it.
    writer.hand(0, [(None, piece)])
    writer.drain()
    assert not writer.budget.used
    assert not list(place.root.rglob("*.safetensors"))
    writer.close()
