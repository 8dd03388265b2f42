"""Many threads that open sessions on one model: none sees another's calls, and nothing is left behind."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.engine.session import open_here
from tenterhook.testing import no_leak, untouched

THREADS = 100


def work(model, x, plain, k, sessions):
    """Open sessions of a random kind, one after the other; each sees what this thread alone did."""
    draw = torch.Generator().manual_seed(k)
    for _ in range(sessions):
        what = int(torch.randint(5, (), generator=draw))
        if what == 0:
            with th.record(model) as tape:
                assert torch.equal(model(x), plain)
            assert len(tape.calls("2")) == 1
            assert torch.equal(tape["2"], plain)
        elif what == 1:
            with th.edit(model, {"2": th.scale(k)}):
                assert torch.equal(model(x), plain * k)
        elif what == 2:
            mine = x.clone().requires_grad_()
            with th.record(model, "1", grad=True) as tape:
                (model(mine) * k).sum().backward()
            assert torch.allclose(tape.grad["1"], k * model[2].weight.sum(0).expand(4, 8), rtol=1e-4)
        elif what == 3:
            with th.record(model, "0", stop=True) as tape:
                model(x)
            assert list(tape) == ["0"]
        else:
            with pytest.raises(ZeroDivisionError), th.edit(model, {"1": lambda _: 1 / 0}):
                model(x)
    assert not open_here()


def run(sessions):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(requires_grad=False)
    x = torch.randn(4, 8)
    plain, interval = model(x), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with untouched(model), ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda k: work(model, x, plain, k, sessions // THREADS), range(2, 2 + THREADS)))
    finally:
        sys.setswitchinterval(interval)
    assert torch.equal(model(x), plain)


def test_sessions_in_a_hundred_threads_do_not_meet():
    run(THREADS)  # What a process keeps from its first sessions is kept once.
    with no_leak():
        run(1_000)


@pytest.mark.soak
def test_many_sessions_in_a_hundred_threads_do_not_meet():
    run(THREADS)
    with no_leak():
        run(int(os.environ.get("SOAK_SESSIONS", "150000")))
