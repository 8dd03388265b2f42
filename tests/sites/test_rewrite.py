"""Every way a name is bound and every call, in a function that is rewritten and in all else stays what it was."""

import contextlib
import inspect
import traceback
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tenterhook as th
from tenterhook.testing import untouched


class Base(nn.Module):
    def scale(self, v):
        scaled = v * 2
        return scaled


class Forms(Base):
    def __init__(self):
        super().__init__()
        self.cache = None
        self.table = {}
        self.__secret = 5.0

    def forward(self, x, *rest, factor: float = 1.0, **further):
        """What a docstring says."""
        plain = x + 2
        annotated: torch.Tensor = plain * 3
        first = second = annotated - 1
        (nested, *starred), other = (first, second, second + 1), x
        nested += 10
        if (walrus := nested + 1).sum() > 0:
            branch = walrus
        else:
            branch = -walrus
        for index, item in enumerate((x, plain)):
            branch = branch + index * item
        with torch.autocast("cpu", enabled=False) as context, contextlib.nullcontext(branch) as held:
            inside = held
        try:
            caught = inside.no_such_thing
        except AttributeError:
            caught = inside * 4
        match caught:
            case torch.Tensor() as matched:
                case = matched + 1
        match (case, [case, x], {"a": x, "b": plain}):
            case (one, [two, *rest_of_it], {"a": three, **mapped}):
                summed = one + two + three + rest_of_it[0] + mapped["b"]
        self.cache = case
        self.table["x"] = case + self.__secret
        listed = [each * 2 for each in (x, plain)]
        pairs = [left * right for left, (right, *_) in ((x, (plain,)), (plain, (x, x))) if left is not right]
        keyed = {place: value * 1 for place, value in enumerate(row + 1 for row in x if row is not None)}

        def local(v):
            deep = v + 1
            return deep

        called = local(x) + super().scale(x)
        squared = (lambda v: v**2)(x)
        soft = F.softmax(called, -1) + torch.softmax(squared, -1) + x.softmax(-1)
        product = soft @ soft.T
        return (product.sum() + listed[1].sum() + self.table["x"].sum() + pairs[0].sum() + keyed[2].sum()) * factor


def by_hand(x):
    """Every value, computed in another function that has nothing to do with the first."""
    plain = x + 2
    annotated = plain * 3
    first = annotated - 1
    nested = first + 10
    walrus = nested + 1
    last = walrus + 0 * x + 1 * plain
    caught = last * 4
    case = caught + 1
    called = (x + 1) + x * 2
    soft = F.softmax(called, -1) + torch.softmax(x**2, -1) + x.softmax(-1)
    return {
        "plain": [plain], "annotated": [annotated], "first": [first], "second": [first], "nested[0]": [first],
        "nested[1]": [nested], "walrus": [walrus], "branch[0]": [walrus], "branch[2]": [walrus, last],
        "item": [x, plain], "starred": [[first, first + 1]], "held": [last],
        "inside": [last], "caught[1]": [caught], "matched": [caught], "case": [case],
        "one": [case], "two": [case], "three": [x], "rest_of_it": [[x]], "mapped": [{"b": plain}],
        "summed": [case + case + x + x + plain],
        "self.cache": [case], 'self.table["x"]': [case + 5.0], "each": [x, plain], "left": [x, plain],
        "right": [plain, x], "row": list(x), "value": [row + 1 for row in x], "deep": [x + 1],
        "called": [called], "squared": [x**2], "soft": [soft], "product": [soft @ soft.T], "other": [x],
        "softmax()[0]": [F.softmax(called, -1)], "softmax()[1]": [torch.softmax(x**2, -1)],
        "softmax()[2]": [x.softmax(-1)],
        "matmul()": [soft @ soft.T], "local()": [x + 1], "scale()": [x * 2], "pow()": [x**2],
        "scale():scaled": [x * 2],
    }  # fmt: skip


X = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", by_hand(X))
def test_every_form_of_binding_and_call_is_recorded(name):
    model = Forms()
    with th.record(model, f":{name}") as tape:
        model(X)
    found, expected = tape.calls(f":{name}"), by_hand(X)[name]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_arguments_and_what_is_returned_have_names_too():
    model = Forms()
    with th.record(model, ":x", ":rest", ":factor", ":further", ":in", ":return") as tape:
        returned = model(X, X, factor=2.0, more=X)
    assert torch.equal(tape[":x"], X)
    assert torch.equal(tape[":in"], X)
    assert torch.equal(tape[":return"], returned)
    assert tape[":factor"] == 2.0


def test_all_places_at_once_change_nothing():
    model = Forms()
    plain = model(X)
    with th.record(model, ":*") as tape:
        assert torch.equal(model(X), plain)
    assert len(tape) > 60


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "walrus",
        "nested[1]",
        "deep",
        "softmax()[1]",
        'self.table["x"]',
        "each",
        "left",
        "right",
        "row",
        "item",
        "case",
    ],
)
def test_an_edit_inside_reaches_the_result(name):
    model = Forms()
    with th.edit(model, {f":{name}": lambda v: v * 2}):
        assert not torch.allclose(model(X), Forms()(X))


def test_an_edit_of_one_of_two_chained_names_leaves_the_other():
    class Chained(nn.Module):
        def forward(self, x):
            a = b = x + 1
            return a * 10 + b

    with th.edit(Chained(), {":a": th.zero()}) as session:
        assert session.model(torch.ones(1)).item() == 2.0
    with th.edit(Chained(), {":b": th.zero()}) as session:
        assert session.model(torch.ones(1)).item() == 20.0


def test_a_comprehension_tests_the_value_that_an_edit_has_put_in():
    class Filters(nn.Module):
        def forward(self, x):
            return [a + b for a, b in zip(x, x, strict=True) if a > 0]

    with th.edit(Filters(), {":a": lambda v: -v}) as session:
        assert session.model(torch.tensor([-1.0, 2.0, -3.0])) == [torch.tensor(0.0), torch.tensor(0.0)]


def test_the_gradient_of_a_variable_is_recorded_and_edited():
    model = Forms()
    x = X.clone().requires_grad_()
    with th.record(model, ":called", ":squared", grad=True) as tape:
        model(x).backward()
    called, squared = (x.detach() * 3 + 1).requires_grad_(), (x.detach() ** 2).requires_grad_()
    soft = F.softmax(called, -1) + torch.softmax(squared, -1) + x.detach().softmax(-1)
    expected = torch.autograd.grad((soft @ soft.T).sum(), (called, squared))
    assert torch.allclose(tape.grad[":called"], expected[0], atol=1e-6)
    assert torch.allclose(tape.grad[":squared"], expected[1], atol=1e-6)
    with th.edit(model, grad={":product": th.zero()}):
        grad_without = torch.autograd.grad(model(x), x)[0]
    assert not torch.allclose(grad_without, x.grad)


def test_the_model_is_untouched_and_its_forward_looks_the_same_meanwhile():
    model = Forms()
    before = inspect.signature(model.forward)
    with untouched(model), th.record(model, ":soft"):
        assert inspect.signature(model.forward) == before
        model.forward(X)
        model.cache, model.table = None, model.table
        model.table.clear()


def test_a_traceback_shows_the_users_own_lines():
    class Fails(nn.Module):
        def forward(self, x):
            y = x + 1
            raise ValueError(y.shape)

    line = inspect.getsourcelines(Fails.forward)[1] + 2
    with pytest.raises(ValueError) as caught, th.record(Fails(), ":y") as tape:
        tape._model()(X)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno, frame.name) == (__file__, line, "forward")
    assert frame.line == "raise ValueError(y.shape)"


def test_a_warning_names_the_users_own_line():
    class Warns(nn.Module):
        def forward(self, x):
            y = x + 1
            warnings.warn("look here", stacklevel=1)
            return y

    model, line = Warns(), inspect.getsourcelines(Warns.forward)[1] + 2
    with pytest.warns(UserWarning, match="look here") as caught, th.record(model, ":y"):
        model(X)
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line)]


def test_the_rewritten_function_keeps_what_a_function_has_beside_its_code():
    from tenterhook.address.places import places
    from tenterhook.sites.rewrite import rewritten

    old = Forms.forward
    tapped = [place for place in places(old.__code__, old.__qualname__) if place.name == "soft"]
    new = rewritten(old, frozenset(tapped), frozenset(), None)
    assert new.__code__ is not old.__code__
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__", "__dict__"):
        assert getattr(new, name) == getattr(old, name), name
    assert new.__annotations__ == old.__annotations__
    assert inspect.signature(new) == inspect.signature(old)
    for name in ("co_name", "co_qualname", "co_filename", "co_firstlineno", "co_varnames", "co_argcount"):
        assert getattr(new.__code__, name) == getattr(old.__code__, name), name


def test_a_thousand_sessions_compile_once():
    from tenterhook.sites import rewrite

    model = Forms()
    with th.record(model, ":soft"):
        model(X)
    before = rewrite._code.cache_info().misses
    for _ in range(1000):
        th.record(model, ":soft").start()._undo()
    assert rewrite._code.cache_info().misses == before


def test_a_decorated_forward_is_entered_through_its_decorators():
    import functools

    def doubled(function):
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            return function(self, *args, **kwargs) * 2

        return wrapper

    class Decorated(nn.Module):
        @doubled
        @torch.no_grad()
        def forward(self, x):
            y = x + 1
            return y

    model = Decorated()
    with th.record(model, ":y", ":return") as tape:
        model(X)
    assert torch.equal(tape[":y"], X + 1)
    assert torch.equal(tape[":return"], (X + 1) * 2)


def test_inherited_and_shared_forwards_are_distinguished_by_module():
    class Child(Base):
        def forward(self, x):
            y = self.scale(x) + 1
            return y

    class Grandchild(Child):
        pass

    model = nn.Sequential(Child(), Grandchild(), Child())
    with th.record(model, "1:y") as tape:
        model(X)
    assert list(tape) == ["1:y"]
    assert torch.equal(tape["1:y"], (X * 2 + 1) * 2 + 1)


def test_a_forward_without_source_says_so():
    space = {"nn": nn}
    exec("class Typed(nn.Module):\n    def forward(self, x):\n        y = x + 1\n        return y", space)
    model = space["Typed"]()
    with untouched(model), pytest.raises(th.NoSource, match="no source"):
        th.record(model, ":y")
    with th.record(model, ":x", ":return") as tape:
        model(X)
    assert torch.equal(tape[":return"], X + 1)


ASKED = """
import torch, tenterhook as th
from torch import nn

class Typed(nn.Module):
    def forward(self, x):
        y = x.exp() + 1
        return y

model = Typed()
try:
    th.record(model, ":y")
except th.NoSource as error:
    print("said:", error)

with th.record(model, ":x", ":exp()", ":return") as tape:
    _ = model(torch.zeros(2))

print("recorded:", tape[":exp()"].tolist(), tape[":return"].tolist())
"""


@pytest.mark.parametrize("flags", [["-"], ["-i", "-q"]], ids=["stdin", "prompt"])
def test_what_is_read_from_stdin_or_typed_at_a_prompt_says_that_it_has_no_source(flags):
    import os
    import subprocess
    import sys

    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *flags], input=ASKED, capture_output=True, text=True, check=True, env=path)
    if flags == ["-"] or sys.version_info < (3, 13):  # From 3.13 on, Python keeps what is typed at a prompt.
        assert "said: Typed.forward has no readable source" in done.stdout
    assert "recorded: [1.0, 1.0] [2.0, 2.0]" in done.stdout


def test_a_module_of_which_there_is_only_compiled_code_says_so(tmp_path, monkeypatch):
    import importlib
    import py_compile

    source = tmp_path / "sourceless.py"
    source.write_text(
        "from torch import nn\nclass Model(nn.Module):\n    def forward(self, x):\n        y = x; return y\n"
    )
    py_compile.compile(str(source), cfile=str(tmp_path / "sourceless.pyc"))
    source.unlink()
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("sourceless").Model()
    with untouched(model), pytest.raises(th.NoSource, match="no source"):
        th.record(model, ":y")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # That scripts are a thing of the past.
def test_a_forward_that_is_no_python_function_says_so():
    built_in, scripted = nn.Identity(), torch.jit.script(nn.Linear(3, 3))
    built_in.forward = torch.relu
    with pytest.raises(th.AddressError, match=r"':y': .* has nothing with the name"):
        th.record(scripted, ":y")
    # C does not tell which arguments it takes, so that any name may be one.
    with pytest.raises(th.NeverReached, match=":y"), th.record(built_in, ":y"):
        built_in(X)
    with th.record(built_in, ":return") as tape:
        built_in(X)
    assert torch.equal(tape[":return"], X.relu())


def typed():
    """A model as it is typed at a prompt, with a child of its own."""
    space = {"nn": nn, "torch": torch, "F": F}
    exec(
        "class Typed(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.child = nn.Softmax(-1)\n"
        "    def forward(self, x):\n"
        "        y = F.softmax(x, -1) @ x\n        return self.child(y) + y.softmax(-1)\n",
        space,
    )
    return space["Typed"]()


def test_calls_inside_a_forward_without_source_are_found_as_they_are_made():
    model = typed()
    with untouched(model), th.record(model, ":softmax()", ":matmul()", ":add()") as tape:
        result = model(X)
    product = F.softmax(X, -1) @ X
    assert torch.equal(tape[":matmul()"], product)
    assert torch.equal(tape[":add()"], result)
    first, second = tape.calls(":softmax()")  # The child's own softmax is not the model's.
    assert torch.equal(first, F.softmax(X, -1))
    assert torch.equal(second, product.softmax(-1))


def test_calls_inside_a_forward_without_source_are_edited():
    model = typed()
    with th.edit(model, {":matmul()": th.zero()}):
        assert torch.allclose(model(X), torch.full_like(X, 2 / 3))


def test_a_call_that_a_forward_without_source_never_makes_is_reported():
    with pytest.raises(th.NeverReached), th.record(typed(), ":relu()") as tape:
        tape._model()(X)


def test_a_file_that_changed_since_it_was_imported_is_refused(tmp_path, monkeypatch):
    import importlib

    path = tmp_path / "changing.py"
    text = "from torch import nn\nclass Model(nn.Module):\n    def forward(self, x):\n        y = x + 1; return y\n"
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("changing").Model()
    path.write_text(text.replace("x + 1", "x + 2"))
    with pytest.raises(th.NoSource, match="changed after it was imported"):
        th.record(model, ":y")


def test_a_wrapper_that_hides_what_it_wraps_is_refused():
    class Hidden(nn.Module):
        def forward(self, x):
            y = x + 1
            return y

    model = Hidden()
    original = model.forward

    class Wrapper:
        __wrapped__ = original

        def __call__(self, x):
            return original(x)

    model.__dict__["forward"] = Wrapper()
    with untouched(model), pytest.raises(th.NoSource):
        th.record(model, ":y").start()


def test_a_branch_that_was_not_taken_is_reported_with_its_line():
    model = Forms()
    with pytest.raises(th.NeverReached, match=r"never run: .*test_rewrite\.py:\d+"), th.record(model, ":branch[1]"):
        model(X)


def test_a_name_that_is_never_bound_is_answered_with_the_nearest_and_its_line():
    with pytest.raises(th.AddressError, match=r"Did you mean called \(line \d+\)"):
        th.record(Forms(), ":caled")


def test_each_value_shows_its_file_and_line():
    model = Forms()
    with th.record(model, ":plain") as tape:
        model(X)
    line = inspect.getsourcelines(Forms.forward)[1] + 2
    assert tape.where(":plain") == f"{__file__}:{line}"


def test_a_stop_inside_a_forward_runs_nothing_after_it():
    ran = []

    class Late(nn.Module):
        def forward(self, x):
            y = x + 1
            ran.append("after")
            return y

    with th.record(Late(), ":y", stop=True) as tape:
        tape._model()(X)
    assert not ran
    assert torch.equal(tape[":y"], X + 1)


def test_sessions_inside_one_forward_compose():
    model = Forms()
    with (
        th.record(model, ":plain") as outer,
        th.edit(model, {":plain": lambda v: v * 0}),
        th.edit(model, {":plain": lambda v: v + 1}),
    ):
        model(X)
    assert torch.equal(outer[":plain"], torch.ones_like(X))


def halve(x):
    half = x / 2 if callable(halve) else x
    return half


class Itself(nn.Module):
    def forward(self, x):
        named = halve(x) if isinstance(self, Itself) else x
        return named


def test_functions_and_methods_that_name_themselves_are_reached():
    x = torch.randn(3, 4)
    model = Itself()
    with th.record(model, ":halve():half", ":named") as tape:
        model(x)
    assert torch.equal(tape[":halve():half"], x / 2)
    assert torch.equal(tape[":named"], x / 2)
    relu = nn.ReLU()
    with th.record(relu, ":relu():relu()") as tape:  # F.relu names itself, for tensors of other kinds.
        relu(x)
    assert torch.equal(tape[":relu():relu()"], x.relu())
