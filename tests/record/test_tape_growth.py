"""Tapes of many calls: what is done with them grows as they do, and a page has a limit that it tells."""

import json
import time

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.report.page import tapes_page
from tenterhook.report.value_limit import Limit, ends

FASTER_THAN_LINEAR = 3  # Ten times the calls may take so many times ten times the time, and no more: memory is slower.


def looped(calls):
    """A tape of one module that was called so often, and of the model."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = nn.Tanh()

        def forward(self, x):
            for _ in range(calls):
                x = self.step(x)
            return x

    model = Loop()
    with torch.no_grad(), th.record(model) as tape:
        model(torch.ones(2))
    return tape


def wide(modules):
    model = nn.Sequential(*(nn.Identity() for _ in range(modules)))
    with torch.no_grad(), th.record(model) as tape:
        model(torch.ones(2))
    return tape


def quickest(call, times=3):
    found = []
    for _ in range(times):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def times_of(tape, folder, times=3):
    file = folder / "run.th"
    tape.save(file)
    again = th.load(file)
    return {
        "save": quickest(lambda: tape.save(file), times),
        "load": quickest(lambda: th.load(file), times),
        "show": quickest(lambda: repr(again), times),
        "read": quickest(lambda: list(again.values()), times),
        "page": quickest(lambda: th.page(folder / "run.html", again), 1),
    }


@pytest.mark.parametrize("make", [looped, wide])
def test_ten_times_the_calls_take_about_ten_times_the_time(make, tmp_path):
    few, many = (times_of(make(calls), tmp_path) for calls in (1_000, 10_000))
    for what, seconds in many.items():
        assert seconds < 10 * FASTER_THAN_LINEAR * max(few[what], 0.03), (what, few, many)


@pytest.mark.slow
@pytest.mark.parametrize("make", [looped, wide])
def test_a_hundred_thousand_calls_are_saved_loaded_shown_and_drawn(make, tmp_path):
    few, many = (times_of(make(calls), tmp_path, 1) for calls in (10_000, 100_000))
    for what, seconds in many.items():
        assert seconds < 10 * FASTER_THAN_LINEAR * max(few[what], 0.03), (what, few, many)


def test_a_page_of_many_calls_shows_the_first_and_the_last_and_says_so(monkeypatch):
    monkeypatch.setattr("tenterhook.report.value_limit.MOST_VALUES", 100)
    page = tapes_page({"tape": looped(1000)})
    calls = next(row for row in page.points if row["address"] == "step")["runs"][0]
    assert len(calls) == 62
    assert [calls[0]["call"], calls[-1]["call"]] == [0, 999]
    assert "at most 62 calls of a module are shown: the first and the last ones" in json.dumps(page.remarks)


def test_a_page_of_many_points_shows_the_first_and_the_last_and_says_so(monkeypatch):
    monkeypatch.setattr("tenterhook.report.value_limit.MOST_VALUES", 100)
    page = tapes_page({"tape": wide(1000)})
    assert len(page.points) == 100
    assert {":return", "0", "999"} <= {row["address"] for row in page.points}
    assert "100 of 1,001 points are shown" in json.dumps(page.remarks)


def test_a_small_tape_is_shown_whole():
    tape = looped(10)
    assert Limit.of([tape]) == Limit(None, 10)
    assert ends([1, 2], 5) == [1, 2]
