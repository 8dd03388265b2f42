"""Errors of sessions on compiled models: each names tenterhook, the point and the fix, on every backend."""

import random

import pytest
import torch
from compiled_toys import close, needs_traced_hooks
from torch import nn

import tenterhook as th
from tenterhook.compiled import opaque_edits as opaque
from tenterhook.pytorch.dynamo_probe import can_trace_hooks

# Dynamo's own, as it looks at tensors with a history and at functions of autograd.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")
BACKENDS = ("eager", "aot_eager", "inductor")
FIXES = ("clone()", "opaque=True", "check=False", "set_stance", "without fullgraph", "inside the session")
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Views(nn.Module):
    """A view of a linear layer's output, changed in place or not before the next layer."""

    def __init__(self, *, in_place=False):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.halves, self.last, self.in_place = (
            nn.Linear(4, 4),
            nn.Unflatten(1, (2, 2)),
            nn.Linear(2, 2),
            in_place,
        )

    def forward(self, x):
        h = self.halves(self.fc(x))
        if self.in_place:
            h.mul_(2)
        return self.last(h)


def failing(value):
    return value @ torch.ones(7, 7)


def raising(_value):
    raise KeyError("mine")


CASES = {  # What is opened, and the point that must be named.
    "a recorded gradient of a view": (lambda m: th.record(m, "halves", grad=True), "halves"),
    "an edited gradient of a view": (lambda m: th.edit(m, grad={"halves": th.scale(2.0)}), "halves"),
    "an edit of another shape": (lambda m: th.edit(m, {"halves": lambda v: v[:1]}), "halves"),
    "an edit that fails": (lambda m: th.edit(m, {"fc": failing}), "fc"),
    "an edit that raises": (lambda m: th.edit(m, {"fc": raising}), "fc"),
    "a gradient of another shape": (lambda m: th.edit(m, grad={"last": lambda g: g[:1]}), "last"),
    "an edit of a gradient that fails": (lambda m: th.edit(m, grad={"fc": failing}), "fc"),
    "an edit of a gradient that raises": (lambda m: th.edit(m, grad={"last": raising}), "last"),
    "an opaque edit of another shape": (lambda m: th.edit(m, {"fc": lambda v: v[:1]}, opaque=True), "fc"),
    "an opaque edit that raises": (lambda m: th.edit(m, {"fc": raising}, opaque=True), "fc"),
    "an edit inside that fails": (lambda m: th.edit(m, {":h": failing}), ":h"),
    "a parameter of another shape": (lambda m: th.edit(m, {"fc.weight": lambda v: v[:1]}), "fc.weight"),
    "a call that is not made": (lambda m: th.record(m, "fc#3"), "fc#3"),
}


def calls(way, model, **options):
    def function(x):
        return model(x)

    return torch.compile(model if way == "model" else function, **options)


def told(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("way", ["model", "function"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_an_error_names_the_point_and_the_fix(case, backend, way, fullgraph):
    if "gradient" in case and not fullgraph and not can_trace_hooks():
        pytest.skip("this torch traces no hooks on tensors, and nothing goes wrong outside of a graph")
    opened, point = CASES[case]
    torch.compiler.reset()
    model = Views(in_place="view" in case)
    call = calls(way, model, backend=backend, fullgraph=fullgraph)
    wanted = model(X)
    session = opened(model)
    with pytest.raises(Exception) as caught, session:
        call(X).sum().backward()
    error, text = caught.value, told(caught.value)
    assert f"'{point}'" in text or f"  {point}: " in text
    if "raises" in case and not isinstance(error, th.TenterhookError):
        assert "in the edit raising at" in text  # The edit's own error, with a note.
        return
    assert isinstance(error, th.TenterhookError)
    assert type(error).__module__.startswith("tenterhook")
    if case != "a call that is not made":
        assert any(fix in text for fix in FIXES)
    assert "Developer debug context" not in text
    assert close(call(X), wanted)  # The model is as it was.


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stop_that_cannot_leave_a_whole_graph_names_its_point(backend):
    torch.compiler.reset()
    model = Views()
    call = calls("function", model, backend=backend, fullgraph=True)
    with pytest.raises(th.SessionError, match=r"(?s)the stop after 'fc'.*fullgraph=True.*set_stance"):
        with th.record(model, "fc", stop=True):
            call(X)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case", ["hooks of others", "a fused layer", "gather", "total gradients", "a recurrent weight"]
)
def test_what_is_left_to_the_engine_is_named_where_a_graph_must_be_whole(case, backend):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.rnn = nn.Linear(4, 4), nn.LSTM(4, 4)
            self.layer = nn.TransformerEncoderLayer(4, 1, 6, batch_first=True)

        def forward(self, x):
            h = self.fc(x)
            return h if case not in ("a recurrent weight", "a fused layer") else self.other(h)

        def other(self, h):
            return self.rnn(h)[0] if case == "a recurrent weight" else self.layer(h[None])

    opened, point = {
        "hooks of others": (lambda m: th.record(m, "fc"), "fc"),
        "a fused layer": (lambda m: th.record(m, "layer.linear1"), "layer"),
        "gather": (lambda m: th.record(m, "fc", gather=True), "fc"),
        "total gradients": (lambda m: th.record(m, "fc:in", grad="total"), "fc:in"),
        "a recurrent weight": (lambda m: th.edit(m, {"rnn.weight_hh_l0": th.zero()}), "rnn"),
    }[case]
    torch.compiler.reset()
    model = Net().eval()
    if case == "hooks of others":
        model.fc.register_forward_hook(lambda _module, _args, out: out + 1)
    call = calls("function", model, backend=backend, fullgraph=True)
    with pytest.raises(th.SessionError, match=rf"(?s)'{point}.*fullgraph=True.*set_stance"), opened(model):
        call(X.clone().requires_grad_())


def test_of_one_function_at_several_points_the_one_that_fails_is_named():
    def edit(value):
        return value @ torch.ones(4, 4)

    torch.compiler.reset()
    model = Views()
    call = torch.compile(model, backend="eager")
    with pytest.raises(th.EditError, match=r"at 'last' fails"), th.edit(model, {"fc": edit, "last": edit}):
        call(X)


def test_an_error_of_the_model_itself_has_a_note_that_names_the_session():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) @ torch.ones(7, 7)

    torch.compiler.reset()
    model = Broken()
    call = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError) as caught, th.record(model, "fc"):
        call(X)
    assert not isinstance(caught.value, th.TenterhookError)
    (note,) = caught.value.__notes__
    assert note.startswith("tenterhook: a session was part of this compiled model (record at 'fc').")


def test_the_backward_pass_of_an_opaque_edit_whose_session_is_over_names_it(monkeypatch):
    monkeypatch.setitem(opaque._points, 10**9, "fc")
    with pytest.raises(
        th.EditError, match=r"opaque edit at 'fc' after its session was closed. Call backward\(\) inside"
    ):
        torch.ops.tenterhook.opaque_backward(X, X, torch.tensor(10**9))


# -- random models, against what plain hooks see ---------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, *, view):
        super().__init__()
        self.fc, self.view = nn.Linear(4, 4), view

    def forward(self, x):
        out = self.fc(x)
        return out.view(-1, 2, 2).transpose(1, 2) if self.view else out


class Chain(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.changed = [in_place for _, in_place in layers]
        self.layers = nn.ModuleList(Layer(view=view) for view, _ in layers)

    def forward(self, x):
        for layer, in_place in zip(self.layers, self.changed, strict=True):
            x = layer(x)
            if in_place:
                x.mul_(2)
            x = x.reshape(-1, 4).tanh()
        return x


def views_changed_in_place(model, x):
    """The outputs that are views and are changed in place later, as hooks of PyTorch see it in a plain run."""
    seen = {}

    def keep(name):
        return lambda _module, _args, out: seen.setdefault(name, (out, out._version, out._is_view())) and None

    handles = [layer.register_forward_hook(keep(f"layers.{at}")) for at, layer in enumerate(model.layers)]
    model(x)
    for handle in handles:
        handle.remove()
    views = {name for name, (_, _, is_view) in seen.items() if is_view}
    return views, {name for name, (out, version, _) in seen.items() if name in views and out._version != version}


@needs_traced_hooks
@pytest.mark.parametrize("seed", range(40))
def test_views_that_are_changed_in_place_are_named_and_no_others(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    torch.compiler.reset()
    layers = [(draw.random() < 0.5, draw.random() < 0.4) for _ in range(draw.randint(1, 4))]
    model, x = Chain(layers), torch.randn(2, 4)
    views, changed = views_changed_in_place(model, x)
    names = draw.sample([f"layers.{at}" for at in range(len(layers))], draw.randint(1, len(layers)))
    call = calls(
        draw.choice(("model", "function")), model, backend=draw.choice(BACKENDS[:2]), fullgraph=draw.random() < 0.5
    )
    session = (
        th.record(model, *names, grad=True) if seed % 2 else th.edit(model, grad=dict.fromkeys(names, th.scale(3.0)))
    )
    wrong = changed & set(names)
    if not wrong:
        with session:
            call(x).sum().backward()
        return
    with pytest.raises(th.GradientError) as caught, session:
        call(x).sum().backward()
    named = {name for name in (f"layers.{at}" for at in range(len(layers))) if f"'{name}'" in str(caught.value)}
    first = min(wrong)
    assert first in named  # Tracing ends at the first of them.
    assert named <= views & {name for name in names if name <= first}
    assert "x.mul_(2)" in str(caught.value)
    assert "clone()" in str(caught.value)
