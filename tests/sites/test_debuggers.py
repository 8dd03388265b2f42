"""Debuggers and coverage tools go by file and line: in a rewritten forward they find the lines that the user wrote."""

import bdb
import inspect
import io
import json
import os
import pdb  # noqa: T100 - it is what is tested
import subprocess
import sys
import trace

import pytest
import torch
from torch import nn

import tenterhook as th

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Lines(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.linear(
            x,
        )
        if hidden.sum() > 1e9:
            hidden = hidden * 0
        first, second = hidden, hidden + 1
        listed = [
            a * b
            for a, b in zip(first, second, strict=True)
        ]  # fmt: skip
        return self.finish(torch.stack(listed))

    def finish(self, value):
        bent = value.tanh()
        return bent


POINTS = (":hidden[0]", ":first", ":a", ":add()", ":finish():bent")
START = inspect.getsourcelines(Lines.forward)[1]
BENT = inspect.getsourcelines(Lines.finish)[1] + 1


@pytest.fixture(autouse=True)
def _no_breakpoints_are_left():
    """All debuggers of a process share their breakpoints."""
    yield
    bdb.Breakpoint.clearBreakpoints()


class Stops(bdb.Bdb):
    """A debugger that notes where it stopped, and what it saw there."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def user_line(self, frame):
        if frame.f_code.co_filename == __file__:
            self.seen.append((frame.f_code.co_name, frame.f_lineno, set(frame.f_locals)))
        self.set_continue()


def stopped(model, *lines):
    debugger = Stops()
    for line in lines:
        assert debugger.set_break(__file__, line) is None
    before = sys.gettrace()  # A coverage tool may be running these very tests.
    try:
        debugger.runcall(model, X)
    finally:
        sys.settrace(before)
    return debugger.seen


def test_a_breakpoint_stops_in_a_rewritten_forward_and_in_a_function_that_it_is_followed_into():
    model = Lines()
    with th.record(model, *POINTS):
        seen = stopped(model, START + 6, BENT)
    (_, first, names), (_, second, below) = seen[-2:]
    assert (first, second) == (START + 6, BENT)
    assert {"self", "x", "hidden"} <= names
    assert "value" in below


def test_the_debugger_stops_where_it_does_without_a_session():
    model = Lines()
    plain = stopped(model, START + 1, START + 6, START + 11, BENT)
    with th.record(model, *POINTS):
        within = stopped(model, START + 1, START + 6, START + 11, BENT)
    assert [stop[:2] for stop in within] == [stop[:2] for stop in plain]


def test_pdb_shows_the_line_and_evaluates_the_users_own_names():
    model, output = Lines(), io.StringIO()
    # It stops first where it is started; from there it goes on to the breakpoint.
    commands = io.StringIO("continue\np hidden.shape\nlist .\ncontinue\n")
    debugger = pdb.Pdb(stdin=commands, stdout=output, nosigint=True, readrc=False)
    assert debugger.set_break(__file__, START + 6) is None
    before = sys.gettrace()
    try:
        with th.record(model, *POINTS):
            debugger.runcall(model, X)
    finally:
        sys.settrace(before)
    assert "torch.Size([2, 3])" in output.getvalue()
    assert "first, second = hidden, hidden + 1" in output.getvalue()


def covered(model):
    tracer = trace.Trace(count=True, trace=False)
    before = sys.gettrace()
    try:
        tracer.runfunc(model, X)
    finally:
        sys.settrace(before)
    return {line for file, line in tracer.results().counts if file == __file__}


def test_a_line_counter_sees_the_lines_that_it_sees_without_a_session():
    model = Lines()
    plain = covered(model)
    with th.record(model, *POINTS):
        within = covered(model)
    assert within == plain
    assert {START + 1, START + 6, BENT} <= plain
    assert START + 5 not in plain, "the branch that is not taken"


NET = """\
import sys, torch
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        doubled = x * 2
        if doubled.sum() < 0:
            doubled = -doubled
        pairs = [one + other for one, other in zip(doubled, x)]
        return self.finish(torch.stack(pairs))

    def finish(self, value):
        bent = value.tanh()
        return bent

def run(*points):
    model = Net()
    if not points:
        return model(torch.ones(2, 3))
    import tenterhook as th
    with th.record(model, *points):
        return model(torch.ones(2, 3))

if __name__ == "__main__":
    run(*sys.argv[1:])
"""
INSIDE = (":doubled[0]", ":one", ":finish():bent")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(NET, encoding="utf-8")
    return path


def python(script, *arguments, given=""):
    """What a Python of its own says."""
    root = script.parent
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, input=given, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COVERAGE_FILE": str(root / ".coverage")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pdb_run_from_the_command_line_stops_on_the_users_line_and_prints_a_local(script):
    lines = [line.strip() for line in NET.splitlines()]
    line, bent = lines.index("if doubled.sum() < 0:") + 1, lines.index("return bent") + 1
    last = lines.index("return self.finish(torch.stack(pairs))") + 1
    # Not `next`: from Python 3.12 on, a comprehension is stepped through line by line.
    commands = ["p doubled.tolist()", "where", f"until {last}", "p len(pairs)", "continue", "p bent.shape", "args"]
    begin = [f"break net.py:{line}", f"break net.py:{bent}", "continue"]
    said = python(script, "-m", "pdb", str(script), *INSIDE, given="\n".join([*begin, *commands, "continue", "quit\n"]))
    assert f"net.py({line})forward()" in said
    assert "-> if doubled.sum() < 0:" in said
    assert "[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]" in said
    assert "-> return self.finish(torch.stack(pairs))" in said
    assert f"net.py({bent})finish()" in said
    assert "torch.Size([2, 3])" in said
    assert "value = tensor(" in said


def executed(script, *points, branches):
    """The lines, and the branches, that coverage counts in the user's file."""
    python(script, "-m", "coverage", "run", *branches, f"--include={script}", str(script), *points)
    python(script, "-m", "coverage", "json", "-q", "-o", "found.json")
    (found,) = json.loads((script.parent / "found.json").read_text(encoding="utf-8"))["files"].values()
    return {key: found[key] for key in ("executed_lines", "missing_lines", "executed_branches") if key in found}


@pytest.mark.parametrize("branches", [[], ["--branch"]], ids=["lines", "branches"])
def test_coverage_counts_the_lines_that_it_counts_without_a_session(script, branches):
    plain, within = executed(script, branches=branches), executed(script, *INSIDE, branches=branches)
    own = range(5, 15)  # The lines of the model; those of run() differ by what they are to do.
    for kind, found in plain.items():
        first = [line[0] if isinstance(line, list) else line for line in found]
        assert [each for each, line in zip(found, first, strict=True) if line in own] == [
            each for each in within[kind] if (each[0] if isinstance(each, list) else each) in own
        ]
    assert {6, 9, 13} <= set(within["executed_lines"])
    assert 8 in within["missing_lines"], "the branch that is not taken"
