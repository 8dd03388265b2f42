"""Wrappers are transparent: what a point is called does not depend on what is wrapped around it."""

import copy
import random

import pytest
import torch
from torch import nn
from wrapper_toys import WRAPPERS, compiled, peft, random_model, wrapped

import tenterhook as th

WORDS = ("module", "_orig_mod", "model", "base_model")
X = torch.linspace(-1, 1, 6).reshape(2, 3)


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 2)))


@pytest.fixture
def ways():
    with peft() as model:
        yield WRAPPERS | {"peft": model}


def raw_outputs(model, x):
    """The outputs of every module's calls by raw hooks, under the names of named_modules: the truth."""
    found, handles = {}, []
    for name, module in model.named_modules():
        handles.append(
            module.register_forward_hook(lambda m, a, out, name=name: found.setdefault(name, []).append(out))
        )
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_tape_of_a_wrapped_model_has_the_names_and_values_of_the_plain_one(seed, ways):
    model, draw = random_model(seed), random.Random(seed)
    truth = raw_outputs(model, X)
    outer, used = wrapped(copy.deepcopy(model), draw, ways)
    with torch.no_grad(), th.record(outer) as tape:
        outer(X)
    assert {name or ":return" for name in truth} >= set(tape._tracks), used
    for name, outputs in truth.items():
        found = tape.calls(name or ":return")
        assert len(found) == len(outputs)
        assert all(torch.equal(one, other) for one, other in zip(found, outputs, strict=True)), (name, used)


@pytest.mark.parametrize("seed", range(40))
def test_a_plain_address_and_the_name_that_the_wrapper_gives_reach_the_same_module(seed, ways):
    model, draw = random_model(seed), random.Random(seed)
    names = dict(model.named_modules())
    own = {id(module): name for name, module in names.items()}
    outer, used = wrapped(model, draw, ways)
    if "averaged" in used:  # It copies the model.
        own = {}
    for name in names:
        (point,) = th.points(outer, name or ":return")
        assert (point.path, own.get(id(point.module), name)) == (name, name)
    for name, module in outer.named_modules():
        if id(module) in own and name not in names:
            (point,) = th.points(outer, name)
            if point.path.rpartition(".")[2] in WORDS and point.path in names:
                continue  # The model's own child has the name that the wrapper adds: it is meant.
            assert (point.module is module, point.path) == (True, own[id(module)]), (name, used)


@pytest.mark.parametrize("seed", range(20))
def test_parameters_have_their_plain_names(seed, ways):
    model, draw = random_model(seed), random.Random(seed)
    names = [name for name, _ in model.named_parameters()]
    outer, used = wrapped(copy.deepcopy(model), draw, ways)
    assert {str(point) for point in th.points(outer, "**.weight", "**.bias", "**.scale")} == set(names), used
    name = draw.choice(names)
    with torch.no_grad(), th.edit(model, {name: th.scale(2.0)}):
        wanted = model(X)
    with torch.no_grad(), th.edit(outer, {name: th.scale(2.0)}):
        assert torch.equal(outer(X), wanted), (name, used)


@pytest.mark.parametrize("seed", range(20))
def test_an_edit_of_a_plain_address_acts_in_the_wrapped_model(seed, ways):
    model, draw = random_model(seed), random.Random(seed)
    outer, used = wrapped(copy.deepcopy(model), draw, ways)
    name = draw.choice([name or ":return" for name, _ in model.named_modules()])
    with torch.no_grad(), th.edit(model, {name: th.scale(3.0)}):
        wanted = model(X)
    with torch.no_grad(), th.edit(outer, {name: th.scale(3.0)}):
        assert torch.equal(outer(X), wanted), (name, used)


def test_a_child_that_is_called_module_in_a_class_that_is_no_wrapper_keeps_its_name():
    class Holder(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.add_module(name, nn.Linear(3, 3))

        def forward(self, x):
            return next(self.children())(x)

    for name in ("module", "_orig_mod", "base_model", "model", "_fsdp_wrapped_module"):
        model = Holder(name)
        assert [str(point) for point in th.points(model)] == [":return", name]
        assert [str(point) for point in th.points(nn.DataParallel(model))] == [":return", name]
        assert [str(point) for point in th.points(nn.DataParallel(model), f"module.{name}")] == [name]


def test_a_class_that_only_has_the_name_of_torch_compiles_wrapper_is_none():
    class OptimizedModule(nn.Module):
        def __init__(self):
            super().__init__()
            self._orig_mod = nn.Linear(3, 3)

        def forward(self, x):
            return self._orig_mod(x)

    compiled(nn.Linear(1, 1))
    assert [str(point) for point in th.points(OptimizedModule())] == [":return", "_orig_mod"]


def test_globs_and_classes_work_with_plain_names_and_with_prefixes():
    model = nn.DataParallel(compiled(plain()))
    for selector in ("1.*", "module._orig_mod.1.*"):
        assert [str(point) for point in th.points(model, selector)] == ["1.0", "1.1"]
    assert [str(point) for point in th.points(model, nn.DataParallel)] == [":return"]
    assert [str(point) for point in th.points(model, model)] == [":return"]
    assert [str(point) for point in th.points(model, "module._orig_mod.*.weight")] == ["0.weight"]


def test_the_tree_says_what_it_looked_through():
    shown = str(th.points(nn.DataParallel(compiled(plain()))))
    assert "Sequential in torch.compile in DataParallel" in shown
    assert "_orig_mod" not in shown


def test_a_saved_tape_of_a_wrapped_model_answers_to_both_names(tmp_path):
    model = compiled(plain())
    with th.record(model, "1.1", ":return") as tape:
        model(X)
    tape.save(tmp_path / "run.th")
    again = th.load(tmp_path / "run.th")
    assert list(again) == ["1.1", ":return"]
    assert torch.equal(again["_orig_mod.1.1"], again["1.1"])
    assert torch.equal(again["_orig_mod"], again[":return"])


def test_features_watch_and_saved_edits_take_plain_names(tmp_path):
    model, fast = plain(), compiled(plain())
    assert torch.equal(th.features(fast, {"1.0": "mid"})(X)["mid"], th.features(model, {"1.0": "mid"})(X)["mid"])
    th.save_edits(tmp_path / "edits.th", {"1.0": th.scale(2.0)})
    with th.edit(model, th.load_edits(tmp_path / "edits.th")):
        wanted = model(X)
    with th.edit(fast, th.load_edits(tmp_path / "edits.th")):
        assert torch.equal(fast(X), wanted)


def test_a_replay_of_a_wrapped_model_serves_and_is_right():
    for wrap in (nn.DataParallel, compiled):
        model = wrap(plain())
        with torch.no_grad():
            with th.record(model, replay=True) as tape:
                model(X)
            with th.edit(model, {"1.1": th.scale(2.0)}):
                wanted = model(X)
            with th.replay(model, tape), th.edit(model, {"1.1": th.scale(2.0)}):
                assert torch.equal(model(X), wanted)


def test_the_state_dict_of_a_wrapped_model_is_untouched():
    model = nn.DataParallel(plain())
    before = list(model.state_dict())
    with th.record(model, "0", "0.weight"):
        model(X)
    assert list(model.state_dict()) == before
