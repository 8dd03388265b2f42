"""Tapes in the course of a training: a plain loop, and TensorBoard."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import tenterhook as th
from tenterhook.integrations.loop import Sampled
from tenterhook.integrations.tensorboard import TapeWriter, write_tape
from tenterhook.testing import untouched


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(108, 2))


def train(model, sampled, steps, fail=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        with sampled:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 1, 8, 8)).square().sum()
            if step == fail:
                raise ValueError("a bad batch")
            loss.backward()
            optimizer.step()


def touched(model):
    """Whether anything stands on a module: a hook, or a forward of its own."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return any("forward" in vars(each) or any(getattr(each, name) for name in tables) for each in model.modules())


def test_every_so_many_steps_a_tape_is_passed_on(model):
    seen = []
    sampled = Sampled(model, "*", every=3, then=lambda step, tape: seen.append((step, tape)))
    train(model, sampled, 7)
    assert [step for step, _ in seen] == [0, 3, 6]
    assert all(tape.grad["0"].shape == (2, 3, 6, 6) for _, tape in seen)
    assert not torch.equal(seen[0][1]["3"], seen[1][1]["3"])  # It has learned in between.


def test_a_training_that_is_sampled_is_the_same_bit_for_bit(model):
    twin = nn.Sequential(
        *[type(each)(*args) for each, args in zip(model, [(1, 3, 3), (True,), (), (108, 2)], strict=True)]
    )
    twin.load_state_dict(model.state_dict())
    with untouched(nn.Linear(1, 1)):
        train(model, Sampled(model, "**", every=2, then=lambda *_: None), 5)
    train(twin, Sampled(twin, "**", every=100, then=lambda *_: None), 5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_between_the_steps_that_are_recorded_nothing_is_on_the_model(model):
    sampled = Sampled(model, "*", every=2, then=lambda *_: None)
    with sampled:
        assert touched(model)
        model(torch.ones(1, 1, 8, 8))
    with sampled:
        assert not touched(model)
        model(torch.ones(1, 1, 8, 8))
    with sampled:
        assert touched(model)
        model(torch.ones(1, 1, 8, 8))
    assert not touched(model)


def test_a_step_that_fails_leaves_nothing_and_the_next_goes_on(model):
    seen = []
    sampled = Sampled(model, "*", every=1, then=lambda step, tape: seen.append(step))
    with pytest.raises(ValueError, match="a bad batch"):
        train(model, sampled, 5, fail=2)
    assert seen == [0, 1]
    assert not touched(model)
    train(model, sampled, 1)
    assert seen == [0, 1, 3]


def test_bad_input_is_an_error(model):
    with pytest.raises(th.AddressError):
        Sampled(model, "nothing", then=print)
    with pytest.raises(th.SessionError, match="every= is a number of steps"):
        Sampled(model, "*", every=0, then=print)
    sampled = Sampled(model, "*", then=print)
    sampled.begin()
    with pytest.raises(th.SessionError, match="has not ended"):
        sampled.begin()
    sampled.end(ValueError("a bad batch"))
    assert not touched(model)


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def events(folder):
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


@pytest.fixture
def writer(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as opened:
        yield opened


def test_a_training_is_written_to_tensorboard(model, writer, tmp_path):
    train(model, Sampled(model, "*", every=2, then=TapeWriter(writer, images=True)), 3)
    writer.flush()
    found = events(tmp_path)
    tags = found.Tags()
    assert {"value/0", "grad/0", "value/3", "grad/3"} <= set(tags["histograms"])
    assert [event.step for event in found.Scalars("grad/3/rms")] == [0, 2]
    assert "value/0/maps" in tags["images"]


def test_the_numbers_are_those_of_the_tape(model, writer, tmp_path):
    with th.record(model, "0", "3", "3:in", grad=True) as tape:
        model(torch.randn(2, 1, 8, 8)).sum().backward()
    write_tape(writer, tape, 7)
    writer.flush()
    found = events(tmp_path)
    (event,) = found.Scalars("value/0/rms")
    assert event.value == pytest.approx(float(tape["0"].square().mean().sqrt()), rel=1e-5)
    (drawn,) = found.Histograms("grad/3_in")
    assert drawn.histogram_value.num == tape.grad["3:in"].numel()
    assert drawn.histogram_value.max == pytest.approx(float(tape.grad["3:in"].max()), rel=1e-5)


def test_what_is_not_finite_is_counted_and_not_drawn(writer, tmp_path):
    model = nn.Identity()
    with th.record(model, ":return") as tape:
        model(torch.tensor([1.0, float("nan"), float("inf"), 3.0]))
    write_tape(writer, tape, 0)
    with th.record(model, ":return") as tape:
        model(torch.full((2,), float("nan")))
    write_tape(writer, tape, 1)
    writer.flush()
    counted = events(tmp_path).Scalars("value/_return/not finite")
    assert [event.value for event in counted] == [2, 2]
