"""Results as the last line of a notebook's cell: tables and pictures, with every backend of matplotlib."""

import html
import sys

import matplotlib as mpl
import pytest
import torch
from matplotlib._pylab_helpers import Gcf
from torch import nn

import tenterhook as th

NAME = "<script>alert(1)</script>&"
PNG = b"\x89PNG"


class Odd(nn.Sequential):
    """A model with a name that is HTML."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.add_module(NAME, nn.Linear(4, 8))
        self.add_module("relu", nn.ReLU())
        self.add_module("head", nn.Linear(8, 2))


Odd.__name__ = "<b>Odd</b>"
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def tape_of(model):
    with th.record(model, "*", grad=True) as tape:
        model(X).sum().backward()
    return tape


def watch_of(model):
    with th.watch(model, on_nan="record") as found:
        model(X).sum().backward()
    return found


def nonfinite_of(model):
    with th.watch(model, on_nan="record") as found:
        model(X * torch.nan)
    return found.nonfinite


def audit_of(model):
    model[0].register_forward_hook(lambda *_: None)
    return th.audit(model)


def sweep_of(model):
    cases = th.grid(lambda point: {point: th.zero()}, point=[th.points(model, "*").addresses[0], "head"])
    return th.sweep(model, cases, lambda output: output.sum(), X)


def first(model):
    return th.points(model, "*").addresses[0]


SHOWN = {
    "points": lambda model, _: th.points(model, inputs=X),
    "tape": lambda model, _: tape_of(model),
    "gradients": lambda model, _: tape_of(model).grad,
    "value": lambda model, _: tape_of(model).look(first(model)),
    "sweep": lambda model, _: sweep_of(model),
    "watch": lambda model, _: watch_of(model),
    "new watch": lambda model, _: th.watch(model),
    "NaN": lambda model, _: nonfinite_of(model),
    "audit": lambda model, _: audit_of(model),
    "harvest": lambda model, folder: th.harvest(model, X, first(model), to=folder, batch_size=3, progress=False),
    "store": lambda model, folder: th.harvest(model, X, first(model), to=folder, progress=False).open(),
    "ablation": lambda model, _: th.recipes.ablate(model, X, points="*", metric=lambda output: output.sum()),
    "attribution": lambda model, _: th.recipes.saliency(model, X, target=1),
    "probes": lambda model, _: th.recipes.probe(model, X, torch.tensor([0, 1] * 3), points=["*"], folds=2),
    "steering": lambda model, _: th.recipes.steering(model, X[:3], X[3:], point=first(model)),
    "attack": lambda model, _: th.recipes.fgsm(model.eval(), X.sigmoid(), torch.tensor([0, 1] * 3), eps=0.1),
    "samples": lambda model, _: th.recipes.per_sample_gradients(model, X, lambda output: output.sum(1)),
    "signal": lambda model, _: th.recipes.learning_signal(model, lambda: model(X).sum()),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_result_shows_itself_as_html_without_the_html_of_names(kind, tmp_path):
    model = Odd()
    shown = SHOWN[kind](model, tmp_path / "store")._repr_html_()
    assert shown.startswith("<")
    assert "<script" not in shown
    assert "<b>Odd" not in shown


@pytest.mark.parametrize(
    "kind", ["value", "ablation", "attribution", "probes", "steering", "samples", "signal", "attack"]
)
def test_a_result_with_a_figure_shows_the_figure(kind):
    assert "data:image/png;base64," in SHOWN[kind](Odd(), None)._repr_html_()


@pytest.mark.parametrize("backend", ["agg", "svg", "pdf", "template"])
def test_figures_show_themselves_with_every_backend(backend):
    model = Odd()
    with mpl.rc_context({"backend": backend}):
        for figure in (tape_of(model).plot("head"), SHOWN["steering"](model, None).show()):
            assert isinstance(figure, mpl.figure.Figure)
            assert figure._repr_png_().startswith(PNG)
    assert Gcf.get_all_fig_managers() == []  # Nothing is shown a second time at the end of the cell.


def test_a_result_that_cannot_be_drawn_shows_its_text(monkeypatch):
    found = SHOWN["steering"](Odd(), None)
    monkeypatch.setitem(sys.modules, "tenterhook._notebook_figure", None)
    assert found._repr_html_() == f"<pre>{html.escape(repr(found))}</pre>"


@pytest.mark.parametrize(
    "read",
    [
        lambda session: session["head"],
        lambda session: session.tape["head"],
        lambda session: session.tape.calls("head"),
        lambda session: session.tape.grad["head"],
        lambda session: session.tape.sequence("head"),
        lambda session: session.tape.look("head"),
    ],
)
@pytest.mark.parametrize("selector", ["head", "*"])
def test_a_recording_that_was_not_started_says_what_to_do(read, selector):
    session = th.record(Odd(), selector, grad=True)
    with pytest.raises(th.NotRecorded, match=r"(?s)not started.*with th\.record.*\.start\(\)"):
        read(session)
    assert "head" not in session.tape


def test_a_recording_that_was_started_names_its_tape():
    session = th.record(Odd(), "head").start()
    session.model(X)
    with pytest.raises(th.SessionError, match=r"session\.tape\['head'\]"):
        session["head"]
    assert session.tape["head"].shape == (6, 2)
    session.close()
