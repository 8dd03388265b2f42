"""The first session of a process, opened where PyTorch's settings are not the usual ones."""

import subprocess
import sys

import pytest

SCRIPT = """
import torch, tenterhook as th
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()

def plain(x):
    return model(x).sum()

def recorded(x):
    with th.record(model) as tape:
        return model(x).sum()

def edited(x):
    with th.edit(model, {{"0": th.scale(1.0)}}):
        return model(x).sum()

x = torch.ones(2, 3, dtype=torch.float64)
def run(function):
    {run}

for verb in {verbs}:
    assert torch.allclose(run(verb), run(plain))
"""
RUNS = {
    "grad": "return torch.func.grad(function)(x)",
    "vmap": "return torch.func.vmap(function)(x)",
    "jvp": "return torch.func.jvp(function, (x,), (x,))[1]",
    "vmap without gradients": "with torch.no_grad(): return torch.func.vmap(function)(x)",
    "inference mode": "with torch.inference_mode(): return function(x)",
    "default device": "with torch.device('meta'): return function(x)",
}


@pytest.mark.parametrize("run", RUNS)
def test_the_first_session_of_a_process_may_be_opened_anywhere(run):
    first = list(RUNS).index(run) % 2
    script = SCRIPT.format(run=RUNS[run], verbs=["recorded, edited", "edited, recorded"][first])
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
