"""Probes pass here, fail loudly and early elsewhere, are not disturbed by what a user has on, and leave nothing."""

import contextlib
import copy
import dataclasses
import json
import random
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.utils.checkpoint
from sabotage_targets import import_room
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tenterhook as th
from tenterhook import hooks
from tenterhook.pytorch import support
from tenterhook.pytorch.dynamo_probe import can_trace_hooks
from tenterhook.pytorch.support import FEATURES, ProbeFailed, Status
from tenterhook.testing import no_leak, state_of, untouched

# The probe of compiled models takes a second, and the first call of that of make_fx too.
LIGHT = [
    "backward hooks", "backward passes", "checkpointed edits", "gradients", "hooks of other libraries",
    "fused attention on the meta device", "kernels over many tensors", "listing hooks", "make_fx",
    "memory and graph nodes", "static inputs of graphs", "modes", "module calls", "parameters of recurrent layers",
    "shared state", "stopping a run", "structured values", "tracing", "transforms of torch.func",
    "weights computed from parameters",
]  # fmt: skip
IN_GRAPHS = "hooks inside compiled graphs"
NAMES = [*LIGHT, "compiled models", IN_GRAPHS]
MODEL = nn.Identity()
X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture(autouse=True, scope="module")
def _room():
    import_room()


def fresh(name):
    """A feature whose probe has not run."""
    return dataclasses.replace(FEATURES[name], status=None, why="")


def outcome(name):
    found = fresh(name)
    return found.run(), found.why


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


# -- on the installed release ------------------------------------------------------------------------------------------


def test_every_feature_is_tested_here():
    assert set(NAMES) == set(FEATURES)


@pytest.mark.parametrize("name", NAMES)
def test_every_feature_works_the_fast_way_as_often_as_it_is_probed(name):
    if name == IN_GRAPHS and not can_trace_hooks():  # As on torch 2.10.
        assert outcome(name)[0] is Status.FALLBACK
        return
    for _ in range(3):
        assert outcome(name) == (Status.FAST, "")


# PyTorch itself makes reference cycles in these: graphs of torch.fx, and the classes of parametrized modules.
CYCLES_OF_PYTORCH = {"make_fx", "weights computed from parameters"}


@pytest.mark.parametrize("name", [name for name in LIGHT if name not in CYCLES_OF_PYTORCH])
def test_a_probe_keeps_no_tensor_alive(name):
    thread = support._ProbeThread()  # A new one: state of the thread is made by the first probe that needs it.
    with no_leak():
        thread.run(FEATURES[name].probe)


@pytest.mark.parametrize("name", LIGHT)
def test_a_probe_takes_some_milliseconds(name):
    outcome(name)  # What it loads is loaded once.
    best = min(_seconds(name) for _ in range(5))
    assert best < 0.5  # Some milliseconds on a quiet machine; a slow one is not a failure.


def _seconds(name):
    import time

    start = time.perf_counter()
    outcome(name)
    return time.perf_counter() - start


# -- where a probe fails -----------------------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    """Break a feature for one test."""

    def break_one(name, error=None):
        def probe():
            raise error or ProbeFailed("it works in another way")

        monkeypatch.setitem(FEATURES, name, dataclasses.replace(FEATURES[name], status=None, why="", probe=probe))
        monkeypatch.setattr(support, "_work", set())

    return break_one


def opened(session):
    with session:
        pytest.fail("the session has started")


SESSIONS = {
    "module calls": lambda model: th.record(model, "0"),
    "backward passes": lambda model: th.edit(model, {"0": th.zero()}),
    "tracing": lambda model: th.record(model, "0"),
    "transforms of torch.func": th.watch,
    "structured values": lambda model: th.record(model, "0"),
    "gradients": lambda model: th.record(model, "0", grad=True),
    "stopping a run": lambda model: th.record(model, "0", stop=True),
    "modes": th.replay,
    "parameters of recurrent layers": lambda model: th.edit(model, {"rnn.weight_hh_l0": th.zero()}),
}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_that_needs_a_broken_feature_raises_when_it_starts_and_leaves_the_model_alone(name, broken):
    model = mlp()
    model.rnn = nn.RNN(3, 3)
    session = SESSIONS[name](model)
    broken(name)
    with untouched(model), pytest.raises(th.UnsupportedTorch) as caught:
        opened(session)
    text = str(caught.value)
    assert text.startswith(f"{name} is not available with torch {torch.__version__}")
    assert "it works in another way" in text
    assert f"Still works: {FEATURES[name].still_works}" in text


CALLS = {
    "gradients": lambda model: hooks.register_backward_hook(model, lambda *_: None),
    "listing hooks": th.audit,
    "shared state": lambda model: th.features(model, ["0"]),
    "memory and graph nodes": lambda model: th.cost(model, X),
    "modes": lambda model: th.sweep(model, [{"0": th.zero()}], lambda out: out.sum(), X),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_needs_a_broken_feature_raises_at_once(name, broken):
    model = mlp()
    broken(name)
    with untouched(model), pytest.raises(th.UnsupportedTorch, match=name):
        CALLS[name](model)


def test_what_does_not_need_a_broken_feature_works(broken):
    model = mlp()
    broken("gradients")
    with th.record(model, "0") as tape, th.edit(model, {"1": th.zero()}):
        model(X)
    assert tape["0"].shape == (2, 3)


def test_whatever_a_probe_raises_makes_its_feature_unavailable(broken):
    broken("gradients", AttributeError("module 'torch._C' has no attribute '_x'"))
    with pytest.raises(th.UnsupportedTorch, match=r"AttributeError: module 'torch\._C' has no attribute '_x'"):
        opened(th.record(mlp(), "0", grad=True))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)


def test_an_edit_of_a_model_with_checkpoints_is_refused_when_it_starts(broken):
    import torch._dynamo  # noqa: F401  As PyTorch does in the first checkpoint.

    model = Checkpointed()
    broken("checkpointed edits")
    with untouched(model), pytest.raises(th.UnsupportedTorch, match="checkpointed edits"):
        opened(th.edit(model, {"layer": th.zero()}))


def test_a_session_on_a_module_with_hooks_of_others_is_refused_when_it_starts(broken):
    model = mlp()
    model[0].register_forward_hook(lambda *_: None)
    broken("hooks of other libraries")
    with untouched(model), pytest.raises(th.UnsupportedTorch, match="hooks of other libraries"):
        opened(th.record(model, "0"))


# -- once per process, and lazily --------------------------------------------------------------------------------------


def in_process(code):
    """What a new process prints, as JSON."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


LAZY = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import tenterhook
seconds = time.perf_counter() - start
from tenterhook.pytorch.support import FEATURES
new = [name for name in sys.modules if name not in before]
print(json.dumps({"ran": [name for name, each in FEATURES.items() if each.status], "new": new, "seconds": seconds}))
"""


def test_importing_tenterhook_runs_no_probe_and_loads_no_slow_part_of_pytorch():
    found = in_process(LAZY)
    assert found["ran"] == []
    assert not [
        name for name in found["new"] if name.startswith(("torch._", "torch.dist", "torch.fx", "sympy", "rich"))
    ]


FIRST = """
import json, sys
import torch, tenterhook as th
th.record, th.edit  # Their modules declare the features.
from tenterhook.pytorch.support import FEATURES
model = torch.nn.Linear(2, 2)
counts = {name: 0 for name in FEATURES}
def counted(name, probe):
    def run():
        counts[name] += 1
        return probe()
    return run
for name, each in FEATURES.items():
    each.probe = counted(name, each.probe)
for _ in range(3):
    with th.record(model, ":return") as tape:
        model(torch.ones(2))
plain = dict(counts)
for _ in range(2):
    with th.record(model, ":return", grad=True) as tape:
        model(torch.ones(2)).sum().backward()
print(json.dumps({"plain": plain, "all": counts, "dynamo": "torch._dynamo" in sys.modules}))
"""


def test_a_session_runs_the_probes_that_it_needs_once():
    found = in_process(FIRST)
    needed = {"module calls", "backward passes", "tracing", "transforms of torch.func", "structured values"}
    needed |= {"hooks of other libraries"}  # Cheaper than to look for such hooks at every module.
    assert {name for name, count in found["plain"].items() if count} == needed
    assert {name for name, count in found["all"].items() if count} == {*needed, "gradients"}
    assert max(found["all"].values()) == 1
    assert not found["dynamo"]


def test_threads_that_ask_at_once_run_a_probe_once(monkeypatch):
    calls, began = [], threading.Barrier(4)
    feature = dataclasses.replace(FEATURES["gradients"], status=None, probe=lambda: calls.append(1))

    def ask():
        began.wait()
        feature.run()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]


PATCHED = """
import json, torch, tenterhook as th
from torch import nn
model, said, original = nn.Sequential(nn.Linear(2, 2)), [], nn.Module.__call__
def session():
    try:
        with th.record(model, "0") as tape:
            model(torch.ones(1, 2))
        return list(tape)
    except th.UnsupportedTorch as error:
        return str(error).splitlines()[0]
said.append(session())
nn.Module.__call__ = lambda self, *args: type(self).forward(self, *args)
said.append(session())
nn.Module.__call__ = lambda *args: original(*args)
said.append(session())
print(json.dumps(said))
"""


def test_probes_run_again_if_another_library_has_patched_pytorch_since():
    error = f"module calls is not available with torch {torch.__version__}, and it is needed for every session."
    assert in_process(PATCHED) == [["0"], error, ["0"]]


FORKED_MEANWHILE = """
import os, threading
import tenterhook.pytorch.structures
from tenterhook.pytorch.support import FEATURES, Feature
began, forked = threading.Event(), threading.Event()
slow = Feature("slow", "", lambda: (began.set(), forked.wait())[2:], "")
threading.Thread(target=slow.run).start()
began.wait()
child = os.fork()
if child == 0:
    FEATURES["structured values"].run()
    os._exit(0)
forked.set()
print(os.waitpid(child, 0)[1])
"""


def test_a_process_that_is_forked_during_a_probe_can_run_probes():
    assert in_process(FORKED_MEANWHILE) == 0


# -- whatever the user has switched on ---------------------------------------------------------------------------------


class Doubles(TorchFunctionMode):
    """As a user's mode may: it changes what operations give."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if isinstance(out, torch.Tensor) and out.is_floating_point() else out


class Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise RuntimeError("no operation may run here")


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def warnings_as_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def raises(*_):
    raise RuntimeError("a hook of the user's was called with a module of a probe")


@contextlib.contextmanager
def registered(register, hook=raises, **options):
    handle = register(hook, **options)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def with_backward_hook(register):
    kind = torch_module._global_is_full_backward_hook
    try:
        with registered(register):
            yield
    finally:
        torch_module._global_is_full_backward_hook = kind


def refuse(_tensor):
    raise RuntimeError("nothing may be saved here")


STATES = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "a function mode": Doubles,
    "a dispatch mode": Refuses,
    "default device": lambda: default_device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "saved tensors hooks": lambda: torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
    "no saved tensors hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    "anomaly detection": torch.autograd.detect_anomaly,
    "deterministic": deterministic,
    "no early stop": lambda: torch.utils.checkpoint.set_checkpoint_early_stop(False),
    "checkpoints that are debugged": lambda: torch.utils.checkpoint.set_checkpoint_debug_enabled(True),
    "single-threaded backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "warnings as errors": warnings_as_errors,
    "a forward hook of all modules": lambda: registered(torch_module.register_module_forward_hook),
    "a forward hook that always runs": lambda: registered(torch_module.register_module_forward_hook, always_call=True),
    "a forward pre-hook of all modules": lambda: registered(torch_module.register_module_forward_pre_hook),
    "a backward hook of all modules": lambda: with_backward_hook(torch_module.register_module_full_backward_hook),
    "a legacy backward hook of all modules": lambda: with_backward_hook(torch_module.register_module_backward_hook),
    "a backward pre-hook of all modules": lambda: registered(torch_module.register_module_full_backward_pre_hook),
    "a hook of registered modules": lambda: registered(torch_module.register_module_module_registration_hook),
    "a hook of registered parameters": lambda: registered(torch_module.register_module_parameter_registration_hook),
    "a hook of registered buffers": lambda: registered(torch_module.register_module_buffer_registration_hook),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", LIGHT)
def test_a_probe_is_not_disturbed(name, state):
    if name in ("parameters of recurrent layers", "weights computed from parameters") and "registered" in state:
        pytest.skip("this probe has to make a layer, and PyTorch calls such hooks for what is in it")
    with STATES[state]():
        found = outcome(name)
    assert found == (Status.FAST, "")


@pytest.mark.parametrize("name", LIGHT)
def test_a_probe_is_not_disturbed_by_vmap(name):
    found = []
    torch.func.vmap(lambda x: (found.append(outcome(name)), x)[1])(X)
    assert found == [(Status.FAST, "")]


@pytest.mark.parametrize("name", LIGHT)
def test_a_probe_is_not_disturbed_by_a_backward_pass(name):
    found, x = [], X.clone().requires_grad_()
    y = x * 2
    y.register_hook(lambda _: found.append(outcome(name)))
    y.sum().backward()
    assert found == [(Status.FAST, "")]


@pytest.mark.parametrize("name", LIGHT)
def test_a_probe_is_not_disturbed_inside_a_checkpoint(name):
    found = []

    def function(x):
        found.append(outcome(name))
        return x.sin()

    torch.utils.checkpoint.checkpoint(function, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert found == [(Status.FAST, "")] * 2


FORKED = """
import json, os, sys
import torch, tenterhook as th
model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
if {backward}:
    model(x).sum().backward()
read, write = os.pipe()
if os.fork() == 0:
    from tenterhook.pytorch.support import FEATURES
    try:
        with th.record(model, ":return") as tape, th.edit(model, {{"weight": th.zero()}}):
            model(x)
        said = {{name: each.why for name, each in FEATURES.items() if each.status == "unavailable"}}
    except Exception as error:
        said = str(error)
    os.write(write, json.dumps(said).encode())
    os._exit(0)
os.close(write)
print(os.fdopen(read).read())
"""


@pytest.mark.parametrize("backward", [False, True])
def test_probes_pass_in_a_forked_process(backward):
    assert in_process(FORKED.format(backward=backward)) == {}


# -- nothing is left ---------------------------------------------------------------------------------------------------


def process_state():
    """What a probe could leave behind in the process."""
    from torch._dynamo.utils import counters

    tables = {name: copy.copy(value) for name, value in vars(torch_module).items() if name.startswith("_global_")}
    return {
        **tables,
        **state_of(MODEL),
        "counters": {kind: dict(counts) for kind, counts in counters.items() if counts},
        "stance": repr(torch._dynamo.eval_frame._stance),
        "backends": {key: id(value) for key, value in torch._dynamo.eval_frame.cached_backends.items()},
        "python random": random.getstate(),
        "threads": [thread.name for thread in threading.enumerate()],
        "dtype": torch.get_default_dtype(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "warnings": list(warnings.filters),
        "call": (nn.Module.__call__, nn.Module._call_impl),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_probe_leaves_nothing_behind(name):
    import torch._dynamo

    outcome(name)
    before = process_state()
    outcome(name)
    after = process_state()
    for key, value in before.items():
        found = after[key]
        same = torch.equal(value, found) if isinstance(value, torch.Tensor) else value == found
        assert same, f"{key}: {value} -> {found}"
