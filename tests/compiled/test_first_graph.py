"""The first session in a process that is open when the compiler begins to trace its model."""

import subprocess
import sys

import pytest

from tenterhook.pytorch.dynamo_probe import can_trace_hooks

SCRIPT = """
import torch, tenterhook as th
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))

torch.manual_seed(0)
net, x = Net(), torch.ones(3, 4)
hidden = net.a(x)
loss = net.b(torch.tanh(hidden)).sum()
truth = torch.autograd.grad(loss, hidden)[0]
compiled = torch.compile(net, backend="eager", fullgraph=True)
with {opened} as session:
    compiled(x).sum().backward()
{checks}
"""
RECORDED = """
tape = session
assert torch.equal(tape["a"], hidden), tape["a"]
assert not {grad} or torch.allclose(tape.grad["a"], truth)
"""
CASES = {
    "values": ('th.record(net, "a")', RECORDED.format(grad=False)),
    "gradients": ('th.record(net, "a", grad=True)', RECORDED.format(grad=True)),
    "every module": ("th.record(net, grad=True)", RECORDED.format(grad=True)),
    "the output and an argument": ('th.record(net, "a", "b:in", ":return")', RECORDED.format(grad=False)),
    "an edit": ('th.edit(net, {"b": lambda v: v * 2})', "assert session.compiled.calls == 1"),
    "an edited gradient": ('th.edit(net, grad={"a": lambda g: g * 2})', "assert session.compiled.calls == 1"),
}


NEED_HOOKS = {"gradients", "every module", "an edited gradient"}


@pytest.mark.parametrize("case", CASES)
def test_the_first_session_of_a_process_is_part_of_one_whole_graph(case):
    opened, checks = CASES[case]
    script = SCRIPT.format(opened=opened, checks=checks)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if case in NEED_HOOKS and not can_trace_hooks():
        assert "cannot trace tensor hooks, and the gradient of 'a' needs one" in ran.stderr
    else:
        assert ran.returncode == 0, ran.stderr[-2000:]
