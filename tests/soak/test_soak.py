"""Random sessions on random models for as long as one likes: no leak, no drift, the model always as it was before."""

import contextlib
import gc
import os
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, reject, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook.testing import _same, live_tensors, state_of

WIDTH = 4


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x)
        out = out + 0
        out += x
        return out


class Checkpointed(nn.Module):
    def __init__(self, inner, *, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        if not x.requires_grad:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        once = self.inner(x)
        return self.inner(once)


LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "dropout": lambda: nn.Dropout(0.5),
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "identity": nn.Identity,
    "residual": lambda: Residual(nn.Linear(WIDTH, WIDTH)),
    "twice": lambda: Twice(nn.Linear(WIDTH, WIDTH)),
    "reentrant": lambda: Checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), reentrant=True),
    "recomputed": lambda: Checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), reentrant=False),
}
HOOKS = {
    "forward": lambda module: module.register_forward_hook(lambda *_: None),
    "pre": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "always": lambda module: module.register_forward_hook(lambda *_: None, always_call=True),
}
PATTERNS = ("**", "*", "0", "1", "*:in", "**:input", "*.weight", "**.inner", "1:in", "0#0", "**:once", "**:out")
EXPECTED = (th.TenterhookError, ZeroDivisionError)


class Sessions(RuleBasedStateMachine):
    """Opens and closes sessions in any order, and runs the model in every way between them."""

    @initialize(layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=2, max_size=5), train=st.booleans())
    def build(self, layers, train):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(LAYERS[name]() for name in layers), nn.Linear(WIDTH, WIDTH)).train(train)
        try:
            self._run(grad=True).sum().backward()
        except RuntimeError:
            reject()  # PyTorch alone cannot train it: one layer writes over what another has to remember.
        self.model.zero_grad(set_to_none=True)
        self.known = {id(tensor) for tensor in live_tensors()}
        self.before = state_of(self.model, rng=False)
        self.open, self.hooks = [], []

    def _start(self, session):
        with contextlib.suppress(th.TenterhookError):
            self.open.append(session().start())

    @rule(pattern=st.sampled_from(PATTERNS), grad=st.booleans(), keep=st.sampled_from(["all", "last", 2]))
    def record(self, pattern, grad, keep):
        self._start(lambda: th.record(self.model, pattern, grad=grad, keep=keep))

    @rule(pattern=st.sampled_from(PATTERNS), change=st.sampled_from(["double", "zero", "fail", "nothing"]))
    def edit(self, pattern, change):
        changes = {
            "double": lambda v: v * 2,
            "zero": th.scale(0.0),
            "fail": lambda _: 1 // 0,
            "nothing": lambda _: None,
        }
        self._start(lambda: th.edit(self.model, {pattern: changes[change]}))

    @rule(pattern=st.sampled_from(PATTERNS))
    def edit_gradient(self, pattern):
        self._start(lambda: th.edit(self.model, grad={pattern: lambda g: g * 0.5}))

    def _run(self, *, grad, width=WIDTH):
        with torch.set_grad_enabled(grad):
            return self.model(torch.ones(3, width, requires_grad=grad) * 1)  # No leaf: a layer may work in place.

    @rule(grad=st.booleans())
    def run(self, grad):
        with contextlib.suppress(*EXPECTED):
            self._run(grad=grad)

    @rule()
    def train_a_step(self):
        with contextlib.suppress(*EXPECTED):
            self._run(grad=True).sum().backward()
        self.model.zero_grad(set_to_none=True)

    @rule()
    def run_into_an_error(self):
        with contextlib.suppress(*EXPECTED, RuntimeError, ValueError):
            self._run(grad=False, width=WIDTH + 1)

    @rule(pattern=st.sampled_from(PATTERNS))
    def stop(self, pattern):
        with contextlib.suppress(*EXPECTED), th.record(self.model, pattern, stop=True):
            self._run(grad=False)

    @rule(records=st.booleans())
    def run_in_another_thread(self, records):
        wrong = []

        def other():
            with contextlib.suppress(*EXPECTED), th.record(self.model, "**") if records else contextlib.nullcontext():
                self._run(grad=False)

        def watched():
            try:
                other()
            except BaseException as error:  # noqa: BLE001
                wrong.append(error)

        thread = threading.Thread(target=watched)
        thread.start()
        thread.join()
        assert not wrong

    @rule(which=st.integers(0, 10), kind=st.sampled_from(sorted(HOOKS)))
    def hook(self, which, kind):
        self.hooks.append(HOOKS[kind](self.model[which % len(self.model)]))

    @precondition(lambda self: getattr(self, "hooks", None))
    @rule(which=st.integers(0, 10))
    def unhook(self, which):
        self.hooks.pop(which % len(self.hooks)).remove()

    @precondition(lambda self: not any(session.verb == "edit" for session in getattr(self, "open", ())))
    @rule(grad=st.booleans())
    def what_is_recorded_is_what_the_next_layer_is_given(self, grad):
        with th.record(self.model, "*", "*:in") as tape:
            self._run(grad=grad)
        for place in range(len(self.model) - 1):
            assert torch.equal(tape[f"{place}"], tape[f"{place + 1}:in"])

    @rule()
    def switch_the_collector(self):
        (gc.disable if gc.isenabled() else gc.enable)()

    @precondition(lambda self: getattr(self, "open", None))
    @rule(which=st.integers(0, 10))
    def close(self, which):
        session = self.open.pop(which % len(self.open))
        with contextlib.suppress(th.TenterhookError):
            session.close()

    def teardown(self):
        if not hasattr(self, "open"):
            return
        try:
            while self.open:
                self.close(0)
            while self.hooks:
                self.unhook(0)
            self._check()
        finally:
            gc.enable()

    def _check(self):
        after = state_of(self.model, rng=False)
        moving = (
            "running_mean",
            "running_var",
            "num_batches_tracked",
        )  # Training moves these; they are the model's own.
        wrong = [key for key in self.before.keys() | after.keys() if not _same(self.before.get(key), after.get(key))]
        assert not [key for key in wrong if not any(name in key for name in moving)]
        del after
        kept = {id(tensor) for tensor in self.before.values() if isinstance(tensor, torch.Tensor)}
        left = [tensor for tensor in live_tensors() if id(tensor) not in self.known | kept]
        assert not left


def soak(examples, steps, *, same=False):
    run_state_machine_as_test(
        Sessions,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=(
                Phase.explicit,
                Phase.reuse,
                Phase.generate,
            ),  # A failure is shown as it came: shrinking takes long.
            derandomize=same,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.filterwarnings("ignore::tenterhook.TenterhookWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_short_soak():
    soak(examples=20, steps=20, same=True)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::tenterhook.TenterhookWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_long_soak():
    soak(examples=int(os.environ.get("SOAK_EXAMPLES", "2000")), steps=60)
