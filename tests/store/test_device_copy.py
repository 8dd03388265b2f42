"""The ring and the budget, without a GPU: what is copied to where, and who waits."""

import contextlib
import ctypes
import random
import threading
import time
from collections import deque

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import tenterhook as th
from tenterhook.harvest.job import Job
from tenterhook.store.device_copy import Budget, HostStage, PinnedStage, _Ring
from tenterhook.store.write import Writer

LIMIT = 1000


@example([1, 1, 1, 247, 250, 250, 250, 1], 0)  # A part that ends where the ring does.
@given(st.lists(st.integers(1, LIMIT // 4), max_size=200), st.integers())
def test_parts_of_the_ring_never_overlap_and_lie_inside(sizes, seed):
    """Parts are given back whenever there is no room for the next, and at random."""
    budget = Budget(LIMIT)
    ring, held, draw = _Ring(budget), deque(), random.Random(seed)
    for size in sizes:
        # What taking this part can cost at most, with what is skipped at the end of the ring.
        while held and (draw.random() < 0.3 or budget.used + size + LIMIT // 4 > LIMIT):
            ring.give(held.popleft()[0])
        offset = ring.take(size)
        assert offset >= 0
        assert offset + size <= LIMIT
        assert all(offset + size <= other or other + length <= offset for other, length in held)
        held.append((offset, size))
    while held:
        ring.give(held.popleft()[0])
    assert budget.used == 0


def test_who_finds_no_room_waits_and_nothing_is_dropped():
    budget, done = Budget(100), []
    budget.take(80)

    def second():
        budget.take(50)
        done.append(1)

    waiting = threading.Thread(target=second)
    waiting.start()
    time.sleep(0.05)
    assert not done
    budget.give(80)
    waiting.join(5)
    assert done
    assert budget.peak == 80
    assert budget.waited >= 0.04


def test_one_part_may_pass_however_large():
    budget = Budget(100)
    budget.take(1000)
    assert budget.peak == 1000


def test_from_the_cpu_a_piece_is_had_at_once_if_there_is_room():
    stage = HostStage(Budget(100))
    first = stage.ahead(torch.zeros(80, dtype=torch.uint8))
    assert stage.ahead(torch.zeros(21, dtype=torch.uint8)) is None
    first.release()
    assert stage.ahead(torch.zeros(21, dtype=torch.uint8)) is not None


def test_from_the_cpu_nothing_is_copied():
    tensor = torch.randn(5, 3)
    (piece,) = HostStage(Budget(1000)).stage(tensor)
    assert ctypes.addressof(piece.data.obj) == tensor.data_ptr()
    assert tensor.untyped_storage().resizable()
    assert bytes(piece.data) == tensor.numpy().tobytes()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_from_a_gpu_bytes_arrive_in_order_through_a_ring_that_is_smaller_than_they_are():
    tensor = torch.randint(0, 255, (1 << 22,), dtype=torch.uint8, device="cuda")
    stage, out = PinnedStage(Budget(1 << 20), tensor.device), []
    for piece in stage.stage(tensor):
        piece.ready()
        out.append(bytes(piece.data))
        piece.release()
    assert len(out) == 16
    assert b"".join(out) == tensor.cpu().numpy().tobytes()


# -- a GPU's stage, with what stands in for the GPU -------------------------------------------------------------------


class Event:
    """Of a device that is always done."""

    def __init__(self, **_):
        pass

    def record(self, *_):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, _):
        return 1500.0


class Stream:
    """Of a device that does everything at once."""

    def __init__(self, *_):
        pass

    def wait_event(self, event):
        assert isinstance(event, Event)

    def record_event(self):
        return Event()


@pytest.fixture
def device(monkeypatch):
    """Whatever is asked of CUDA is answered, and done at once."""
    empty = torch.empty

    def pageable(*size, pin_memory=False, **more):
        del pin_memory
        return empty(*size, **more)

    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)


@pytest.fixture
def stage(device):
    return PinnedStage(Budget(1 << 10), torch.device("cpu"))


def test_pieces_of_the_ring_hold_the_bytes_of_the_tensor(stage):
    tensor, out = torch.arange(100, dtype=torch.int64), bytearray()
    for piece in stage.stage(tensor):
        assert piece.ready() == 1.5
        out += piece.data
        piece.release()
    assert bytes(out) == tensor.numpy().tobytes()
    assert stage.budget.used == 0


def test_all_that_was_begun_is_waited_for_at_once_and_held_until_it_is_done(stage, monkeypatch):
    parts = [torch.arange(number, dtype=torch.uint8) for number in (10, 30)]
    pieces = [stage.ahead(part) for part in parts]
    first = stage._open
    assert first._held[1].data_ptr() == parts[1].data_ptr()  # Nobody else gets its memory.
    stage.seal()
    monkeypatch.setattr(Event, "query", lambda _: False)
    stage.ahead(parts[0])
    stage.seal()
    assert [len(group._held) for group in stage._sealed] == [2, 1]  # None is known to be done.
    monkeypatch.setattr(Event, "query", lambda _: True)
    stage.ahead(parts[1])
    assert not stage._sealed
    assert not first._held  # Although nobody has read it yet.
    assert [piece.ready() for piece in pieces] == [6.0, 0.0]  # Four times as much as the first, which took 1.5 s.


def test_what_begins_ahead_never_waits_and_comes_back_in_order(stage):
    parts = [torch.full((25,), number, dtype=torch.int64) for number in range(6)]
    pieces = [stage.ahead(part) for part in parts]
    assert [piece is not None for piece in pieces] == [True] * 5 + [False]  # Five times 200 bytes of 1024.
    for part, piece in zip(parts, pieces[:5], strict=False):
        assert bytes(piece.data) == part.numpy().tobytes()
    with pytest.raises(AssertionError, match="in the order"):
        pieces[1].release()


def test_what_is_not_in_one_piece_is_copied_as_it_reads(stage):
    tensor = torch.arange(24).reshape(4, 6).t()
    assert bytes(stage.ahead(tensor).data) == tensor.contiguous().numpy().tobytes()
    assert stage.ahead(torch.zeros(1 << 9)) is None  # More than a quarter of the ring.
    assert stage.ahead(torch.zeros(0)) is None


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("width", [64, 1024, 9000])
def test_a_harvest_through_a_ring_that_is_full_again_and_again(tmp_path, monkeypatch, width):
    """Of 64 KiB. At 64 a batch fits several times, at 1024 not once, at 9000 not even one point of it in one piece."""

    def stage_of(writer, device):
        return writer._stages.setdefault(device, PinnedStage(writer.budget, device))

    monkeypatch.setattr(Writer, "_stage", stage_of)
    monkeypatch.setattr(Job, "begins", lambda _, begin: begin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 40), nn.Sigmoid())
    rows = torch.randn(200, 8)
    th.harvest(model, rows, "*", to=tmp_path, batch_size=4, shard_rows=40, memory=1 << 16)
    store, value = th.open(tmp_path), [*rows.split(4)]
    for address, layer in model.named_children():
        value = [layer(part) for part in value]
        assert torch.equal(store[address][:], torch.cat(value)), address
    assert store.sample[:].tolist() == list(range(200))
