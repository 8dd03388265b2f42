"""The types of the public names, as a type checker sees them. ``make types`` checks this file, and the tests run it.

``Any`` stands where the model decides: what passes at a point can be a tensor or any structure of tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import tenterhook as th
from tenterhook import hooks
from tenterhook.edit.ready import Add, Edit, Zero
from tenterhook.edit.saved import Edits
from tenterhook.edit.skip import Skip
from tenterhook.edit.verb import Editing
from tenterhook.harvest.progress import Harvest
from tenterhook.integrations.transformers import Generated
from tenterhook.recipes.ablation import Ablation
from tenterhook.recipes.patching import Patching
from tenterhook.recipes.result import Attribution
from tenterhook.recipes.steer import Steering
from tenterhook.record.recorded_gradients import Gradients
from tenterhook.record.verb import Recording
from tenterhook.replay.cases import Case, Grid
from tenterhook.replay.session import Replay
from tenterhook.store.loader import Loader
from tenterhook.store.read import Store, StoredRows
from tenterhook.watch.findings import Finding
from tenterhook.watch.locate_nonfinite import NonFiniteReport
from tenterhook.watch.session import Watch


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


X = torch.ones(3, 4)


def test_points() -> None:
    found = th.points(small(), "*", nn.ReLU, inputs=X)
    assert_type(found, th.Selection)
    assert_type(found.addresses, tuple[str, ...])
    assert_type(found[0], th.Point)
    assert_type(found | found, th.Selection)


def test_record(tmp_path: Path) -> None:
    model = small()
    session = th.record(model, "*", "1:in", grad=True, keep="last", numbering="run")
    assert_type(session, Recording)
    assert_type(session.tape, th.Tape)
    with session as tape:
        assert_type(tape, th.Tape)
        model(X).sum().backward()
    assert_type(tape["1"], Any)
    assert_type(tape.calls("1"), list[Any])
    assert_type(tape.grad, Gradients)
    assert_type(list(tape), list[str])
    assert_type(tape.in_order(), list[str])
    assert_type(tape.plot("1"), Figure)
    tape.save(tmp_path / "run.th")
    assert_type(th.load(tmp_path / "run.th"), th.Tape)
    started = th.record(model, "0").start()
    assert_type(started, Recording)
    model(X)
    assert_type(started.close(), None)


def sequences(tape: th.Tape, done: Generated) -> None:
    assert_type(tape.sequence("h.1", run=0), Tensor)
    assert_type(tape.tokens, Tensor)
    assert_type(tape.mask, Tensor)
    assert_type(done.joined("h.1"), Tensor)


def test_edit(tmp_path: Path) -> None:
    model = small()
    assert_type(th.zero(at=th.at[:, -1]), Zero)
    assert_type(th.add(torch.ones(8), scale=2.0), Add)
    assert_type(th.skip(), Skip)
    assert_type(th.skip(lambda x: x), Skip)
    changes: dict[str, Edit] = {"1": th.skip(), "0": th.scale(2.0)}
    with th.edit(model, changes) as session:
        assert_type(session, Editing)
        model(X)
    with th.edit(model, {"1": [th.zero(), lambda value: value + 1], nn.ReLU: th.clamp(min=0.0)}):
        model(X)
    th.save_edits(tmp_path / "a.edits", changes)
    assert_type(th.load_edits(tmp_path / "a.edits"), Edits)
    assert_type(th.load_edits(tmp_path / "a.edits").notes, dict[str, Any])


def test_features() -> None:
    body = th.features(small(), {"0": "low", "1": "high"})
    assert_type(body, th.Features)
    assert_type(body(X), dict[str, Any])
    assert_type(body.points, dict[str, str])


def test_replay_and_sweep() -> None:
    model = small()
    with th.record(model, replay=True) as tape:
        model(X)
    with torch.no_grad(), th.replay(model, tape) as session:
        assert_type(session, Replay)
        model(X)
    cases = th.grid(lambda unit: {"1": th.zero(at=th.at[:, unit])}, unit=range(8))
    assert_type(cases, Grid)
    assert_type(cases[0], Case)
    assert_type(cases[:2], list[Case])
    found = th.sweep(model, cases, lambda output: output.sum(), X)
    assert_type(found, th.Sweep)
    assert_type(found.values, Tensor)
    assert_type(found.base, Tensor | None)


def test_watch() -> None:
    model = small()
    with th.watch(model, on_nan="record") as w:
        assert_type(w, Watch)
        model(X).sum().backward()
    assert_type(w.steps, int)
    assert_type(w.nonfinite, NonFiniteReport | None)
    assert_type(w.findings, list[Finding])
    assert_type(w.series("1"), dict[int, float])


def test_harvest(tmp_path: Path) -> None:
    done = th.harvest(small(), X, "1", to=tmp_path / "acts", progress=False)
    assert_type(done, Harvest)
    assert_type(done.rows, int)
    assert_type(done.open(), Store)
    store = th.open(tmp_path / "acts")
    assert_type(store, Store)
    assert_type(store["1"], StoredRows)
    assert_type(store["1"][:2], Tensor)
    assert_type(store[:2], dict[str, Tensor])
    assert_type(store.grad, Mapping[str, StoredRows])
    assert_type(store.loader("1", batch_size=2), Loader)


def test_audit() -> None:
    assert_type(th.audit(small()), th.Audit)
    assert_type(th.__version__, str)


def diagnosis() -> None:
    assert_type(th.doctor(), th.Diagnosis)


def test_hooks() -> None:
    with hooks.register_forward_hook(small(), lambda module, args, output: None) as handle:
        assert_type(handle, hooks.Handle)


def test_recipes() -> None:
    model = small()
    assert_type(th.recipes.saliency(model, X, target=1), Attribution)
    push = th.recipes.steering(model, X + 1, X - 1, point="1")
    assert_type(push, Steering)
    assert_type(push.show(), Figure)
    assert_type(th.recipes.ablate(model, X, points="*", metric=lambda output: output.sum()), Ablation)
    found = th.recipes.patching.activation(model, X, X * 2, points="*", metric=lambda output: output.sum())
    assert_type(found, Patching)
