"""Numbers on their way to a GPU and back, in memory that is used again: never before it is free."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from tenterhook.statistics import fused, host_copy
from tenterhook.statistics.host_copy import HostCopies, PinnedArray
from tenterhook.statistics.measure import COLUMNS, MEAN, Workspace, measure, whole


class Event:
    """Of a device that is done when somebody waits for it."""

    waited: ClassVar = []

    def __init__(self):
        self.done = False

    def record(self, _stream):
        self.done = False

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True
        self.waited.append(self)


@pytest.fixture
def stands_in(monkeypatch):
    """What stands in for a GPU."""
    empty = torch.empty

    def not_pinned(*args, pin_memory=False, **kwargs):
        return empty(*args, **kwargs)

    monkeypatch.setattr(host_copy.torch, "empty", not_pinned)
    monkeypatch.setattr(Event, "waited", [])
    monkeypatch.setattr(host_copy.torch.cuda, "Event", Event)
    monkeypatch.setattr(host_copy.torch.cuda, "current_stream", lambda _device: None)


@pytest.mark.usefixtures("stands_in")
def test_what_is_on_its_way_is_not_written_over_and_what_was_read_is():
    post = HostCopies()
    first, second = post.send(torch.tensor([1.0, 2.0])), post.send(torch.tensor([3.0, 4.0]))
    assert not first.arrived
    assert not second.arrived
    read = first.read()
    third, fourth = post.send(torch.tensor([5.0, 6.0])), post.send(torch.tensor([7.0, 8.0]))
    assert third._slip is first._slip
    assert second._slip is not first._slip
    assert read.tolist() == [1.0, 2.0]  # What was read is a copy.
    assert second.read().tolist() == [3.0, 4.0]
    assert third.read().tolist() == [5.0, 6.0]
    assert fourth.read().tolist() == [7.0, 8.0]


@pytest.mark.usefixtures("stands_in")
def test_numbers_of_another_shape_or_type_have_memory_of_their_own():
    post = HostCopies()
    post.send(torch.zeros(2, 3)).read()
    letters = [post.send(torch.ones(3, 2)), post.send(torch.ones(2, 3, dtype=torch.float64)), post.send(torch.ones(6))]
    assert [letter.read().shape for letter in letters] == [(3, 2), (2, 3), (6,)]
    assert len(post._free) == 4


@pytest.mark.usefixtures("stands_in")
def test_memory_that_was_first_needed_in_inference_mode_is_written_outside_it():
    post = HostCopies()
    with torch.inference_mode():
        assert post.send(torch.ones(3)).read().tolist() == [1.0] * 3
    assert post.send(torch.zeros(3)).read().tolist() == [0.0] * 3


@pytest.mark.usefixtures("stands_in")
def test_memory_is_not_kept_for_every_shape_that_ever_was():
    post = HostCopies()
    late = post.send(torch.arange(7.0))
    for count in range(1, 5 * host_copy.KINDS):
        letter = post.send(torch.full((count,), float(count)))
        assert letter.read().tolist() == [count] * count
        assert len(post._free) <= host_copy.KINDS
    assert late.read().tolist() == list(range(7))


@pytest.mark.usefixtures("stands_in")
def test_addresses_are_written_where_the_ones_before_have_been_read(monkeypatch):
    waited = Event.waited
    addresses = fused._Addresses(torch.device("cuda"))
    monkeypatch.setattr(fused, "to_device", lambda _device, numbers: torch.from_numpy(numbers.copy()))
    each = [[torch.zeros(16), torch.ones(16)] for _ in range(2 * fused.PINNED_BUFFERS)]
    for tensors in each:
        assert addresses(tensors).tolist() == [tensor.data_ptr() for tensor in tensors]
    assert len(waited) == len(each) - 1  # The first of all is copied as it comes.
    assert (
        waited[: fused.PINNED_BUFFERS]
        == waited[fused.PINNED_BUFFERS :] + waited[fused.PINNED_BUFFERS - 1 : fused.PINNED_BUFFERS]
    )
    count = len(waited)
    assert addresses(each[-1]).tolist() == [tensor.data_ptr() for tensor in each[-1]]
    assert len(waited) == count  # The same as the last time: nothing is sent.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_tables_of_many_steps_on_their_way_at_once_are_each_their_own():
    workspace = Workspace()
    torch.manual_seed(0)
    sent = []
    for step in range(40):
        tensors = [torch.randn(1000 + 10 * i, device="cuda") + step for i in range(50)]
        found = measure(tensors, None, workspace=workspace)
        for numbers in found.numbers:
            numbers.send(workspace.post)
        true = np.stack([whole(tensor) for tensor in tensors])
        sent.append((found, true))
        if len(sent) > 5:
            found, true = sent.pop(step % 3)
            np.testing.assert_allclose(found.host()[:, MEAN:], true[:, MEAN:], rtol=1e-4, atol=1e-4)
    for found, true in sent:
        np.testing.assert_allclose(found.host(), true, rtol=1e-4, atol=1e-4, err_msg=str(COLUMNS))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_slip_carries_numbers_there_and_back():
    there = torch.empty(1000, dtype=torch.int64, device="cuda")
    slip, back = PinnedArray(there.shape, there.dtype), PinnedArray(there.shape, there.dtype)
    for number in range(100):
        slip.event.synchronize()
        slip.array[:] = number
        slip.copy(there, slip.memory)
        back.copy(back.memory, there)
        back.event.synchronize()
        assert (back.array == number).all()
