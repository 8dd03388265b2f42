"""Every feature is probed for a report, also with a PyTorch that is broken, and nothing is left behind."""

import json
import subprocess
import sys

import pytest

PROBES = """
import json, sys, torch
{}
from tenterhook.pytorch.all_features import run_all_probes
features = [(each.name, str(each.status), each.why, each.used_by) for each in run_all_probes()]
"""
AFTERWARDS = """
from tenterhook.pytorch.dynamo import has_compiled_anything
from tenterhook.pytorch.support import FEATURES

counted = dict(torch._dynamo.utils.counters)
compiled = [has_compiled_anything()]
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
compiled.append(has_compiled_anything())
again = []
for each in FEATURES.values():
    each.probe = lambda: again.append(1)
run_all_probes()
print(json.dumps({"features": features, "counted": counted, "compiled": compiled, "again": again}))
"""


def in_process(code):
    return json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))


@pytest.fixture(scope="module")
def found():
    return in_process(PROBES.format("") + AFTERWARDS)


def test_compiled_models_are_probed_although_no_one_has_loaded_the_compiler(found):
    assert "compiled models" in [name for name, *_ in found["features"]]


def test_features_that_every_session_needs_come_first(found):
    needed = [used_by == "every session" for *_, used_by in found["features"]]
    assert needed == sorted(needed, reverse=True)
    assert any(needed)


def test_a_process_that_compiles_nothing_still_counts_as_such_afterwards(found):
    assert found["counted"] == {}
    assert found["compiled"] == [False, True]  # before the process compiles a function, and after


def test_a_second_call_runs_no_probe_again(found):
    assert found["again"] == []


def test_a_compiler_that_cannot_be_loaded_is_reported_and_the_rest_too():
    found = in_process(PROBES.format("sys.modules['torch._dynamo'] = None") + "print(json.dumps(features))")
    status = {name: (status, why) for name, status, why, _ in found}
    assert status["compiled models"][0] == "unavailable"
    assert "torch._dynamo" in status["compiled models"][1]
    assert status["module calls"][0] == "fast"
